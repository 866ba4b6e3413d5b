import pytest

from instruments.errors import ConfigError
from stages.text.batches import TokenSequence, batch_sequences
from stages.train.loop import spoiled
from stages.train.objective import Phase
from stages.train.record import Record, drop_unfinished, find_latest, hash_text, mark_whole, read_record, summarise


def save(record, name):
    folder = record.folder / name
    folder.mkdir(parents=True)
    record.save(folder)
    mark_whole(folder)
    return folder


def test_a_record_goes_on_from_a_checkpoint(tmp_path):
    record = Record.open(tmp_path, None, tensorboard=False)
    for step in (2, 4, 6):
        record.write(step, "router", {"tokens": record.count(10)})
        if step == 4:
            saved = save(record, "checkpoint-4")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "pha')  # a kill cut the line off
    record = Record.open(tmp_path, saved, tensorboard=False)
    record.write(6, "experts", {"tokens": record.count(11)})
    assert [(line["step"], line["tokens"]) for line in read_record(tmp_path)] == [(2, 10), (4, 20), (6, 31)]
    assert read_record(tmp_path) == record.lines
    assert Record.open(tmp_path, None, tensorboard=False).lines == []


def test_losses_of_two_heldout_texts_are_not_compared(tmp_path):
    batches = [batch_sequences([TokenSequence("a", [1, 2, 3], [1, 2, last])], 8, 0) for last in (3, -100)]
    record = Record.open(tmp_path, None, tensorboard=True)
    record.check_heldout(batches[0])
    record.write(0, "start", {"heldout_loss": 2.0, "heldout_text": hash_text(batches[0])})
    record.check_heldout(batches[0])
    sequences = [TokenSequence(name, [1] * length, [1] * length) for name, length in (("a", 3), ("b", 8), ("c", 5))]
    assert len({hash_text(batch_sequences(sequences, tokens, 0)) for tokens in (8, 16, 24)}) == 1
    with pytest.raises(ConfigError, match="other held-out text"):
        record.check_heldout(batches[1])
    record.close()


def test_only_whole_checkpoints_are_gone_on_from(tmp_path):
    for step in (9, 10, 20):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "weights").write_text("w")
    assert find_latest(tmp_path) is None
    mark_whole(tmp_path / "checkpoint-9")
    mark_whole(tmp_path / "checkpoint-10")
    assert find_latest(tmp_path) == tmp_path / "checkpoint-10"
    drop_unfinished(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-9"]


LINES = [
    {"step": 0, "phase": "start", "dense_heldout_loss": 2.0, "heldout_loss": 2.4},
    {"step": 5, "phase": "router", "tokens": 500, "load_max_over_mean": 1.25, "dead_experts": 3, "router_entropy": 1.5,
     "tokens_per_second": 100.0},
    {"step": 5, "phase": "router", "heldout_loss": 2.3},
    {"step": 9, "phase": "experts", "tokens": 900, "load_max_over_mean": 1.5, "dead_experts": 0, "router_entropy": 1.0,
     "tokens_per_second": 200.0},
    {"step": 9, "phase": "experts", "heldout_loss": 2.1},
]  # fmt: skip


def test_table_has_a_row_for_the_start_and_every_phase():
    phases = [Phase("router", 0, 5, frozenset()), Phase("experts", 5, 4, frozenset())]
    table = summarise(LINES, phases, 600)
    assert [list(row) for row in table.rows] == [
        ["start", 0, 0, "2.4000", "+0.4000", "+49.2%", "-", "-", "-", "-", "-"],
        ["router", 5, 500, "2.3000", "+0.3000", "+35.0%", "-", "1.25", 3, "1.500", "100"],
        ["experts", 4, 900, "2.1000", "+0.1000", "+10.5%", "-", "1.50", 0, "1.000", "200"],
    ]
    assert table.notes == [
        "dense model: held-out loss 2.0000; 600 tokens of text, read 1.5 times",
        "training closed 75% of the gap",
    ]
    short = {"step": 10, "phase": "experts", "tokens": 1000, "tokens_per_second": 50.0}
    assert summarise([*LINES, short], phases, 600).rows[2][-1] == "125"  # 400 tokens in 2 s, then 100 in 2 s
    worse = [*LINES, {"step": 9, "phase": "experts", "heldout_loss": 2.5}]
    assert summarise(worse, phases, 600).notes[1] == "the gap grew from +0.4000 to +0.5000 nats"
    better = [*LINES, {"step": 9, "phase": "experts", "heldout_loss": 1.75}]
    below = "the MoE is now 0.2500 nats below the dense model, which was not trained"
    assert summarise(better, phases, 600).notes[1] == below


def test_table_shows_the_distance_from_the_dense_model_and_says_when_it_grew():
    measured = [*LINES, {"step": 9, "phase": "experts", "heldout_divergence": 0.25}]
    measured[0] = LINES[0] | {"heldout_divergence": 0.125}
    table = summarise(measured, [Phase("router", 0, 5, frozenset()), Phase("experts", 5, 4, frozenset())], 600)
    shown = table.columns.index("KL to dense")
    assert [row[shown] for row in table.rows] == ["0.1250", "-", "0.2500"]
    assert "(KL 0.1250, then 0.2500)" in table.notes[-1]
    closer = [*measured, {"step": 9, "phase": "experts", "heldout_divergence": 0.0625}]
    assert "KL" not in summarise(closer, [Phase("router", 0, 5, frozenset())], 600).notes[-1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # TensorBoard's own warnings
def test_tensorboard_reads_the_figures_and_forgets_what_a_kill_undid(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    record = Record.open(tmp_path, None, tensorboard=True)
    for step in (2, 4, 6):
        record.write(step, "router", {"loss": step / 2, "tokens": step})
        if step == 4:
            saved = save(record, "checkpoint-4")
    record.close()
    for path in (tmp_path / "tensorboard").iterdir():
        path.write_bytes(path.read_bytes()[:-7])
    record = Record.open(tmp_path, saved, tensorboard=True)
    record.write(6, "router", {"loss": 7.0})
    record.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(2, 1.0), (4, 2.0), (6, 7.0)]


def test_the_last_checkpoint_may_be_that_of_an_earlier_phase(tmp_path):
    assert "last checkpoint: that before training" in spoiled("it diverges", "", tmp_path / "experts").where
    for folder in ("router/final", "experts/checkpoint-3"):
        (tmp_path / folder).mkdir(parents=True)
        mark_whole(tmp_path / folder)
        assert f"last checkpoint: {tmp_path / folder}" in spoiled("it diverges", "", tmp_path / "experts").where
