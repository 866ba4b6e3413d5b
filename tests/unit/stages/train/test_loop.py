"""What the phases share, when a phase logs and saves, and what it leaves in memory."""

import gc
import math
import shutil
import weakref
from dataclasses import replace

import pytest
import torch
from integration.forked import as_workers
from pico_moes import make_moe
from safetensors.torch import load_file
from torch import nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock
from unit.pipeline.served_carves import carve, write_wrapped_carve
from zoo.checkpoints import write_checkpoint

from instruments.errors import CheckpointError, NumericsError
from models.config import MoEShape
from models.loading import load_whole
from models.training import Part, find_routers, selection_bias
from pipeline.gguf import check_carve
from stages.artifacts.job import Workers
from stages.losses import measure_loss
from stages.text.batches import TokenSequence, batch_sequences
from stages.text.sequences import LoadedText
from stages.train import loop, stage
from stages.train.config import TrainConfig
from stages.train.loop import PhaseLoop, TrainContext, TrainingText, is_due, order_sequences, text_groups
from stages.train.objective import Balance, Phase, make_phases, rate_factor
from stages.train.record import Record, mark_whole, read_record


def make_context(settings, heldout=(), workers=None):
    return TrainContext(
        settings=settings,
        text=TrainingText(LoadedText([], {}), list(heldout), 0),
        logit_std=1.0,
        total=1,
        balance=Balance("none", 0.0),
        teacher=None,
        record=None,
        seed=0,
        workers=workers or Workers(),
        device=torch.device("cpu"),
    )


def draw(count):
    return [TokenSequence(str(n), list(range(n, n + 8)), list(range(n, n + 8))) for n in range(count)]


def test_with_shards_every_process_runs_as_many_forward_passes():
    model, calls = make_moe("qwen3_moe").eval(), []
    model.register_forward_hook(lambda *_: calls.append(1))
    expected = {count: measure_loss(model, batch_sequences(draw(count), 8, 0)).nats for count in (4, 6)}

    def work(workers):
        for count, passes in ((4, 2), (6, 2)):
            calls.clear()
            context = make_context(TrainConfig(fsdp=True), batch_sequences(draw(count), 8, 0), workers)
            assert context.heldout_figures(model) == {"heldout_loss": pytest.approx(expected[count])}
            assert len(calls) == passes

    as_workers(3, work)


def test_with_a_teacher_the_heldout_text_also_gives_the_distance_from_it():
    model, teacher = make_moe("qwen3_moe").eval(), make_moe("qwen3_moe").eval()
    sequences = [TokenSequence(str(n), list(range(n, n + 8)), [-100] * 3 + list(range(n + 3, n + 8))) for n in range(5)]
    heldout = batch_sequences(sequences, 16, 0)
    context = replace(make_context(TrainConfig(), heldout), teacher=teacher)
    with torch.no_grad():
        ours, theirs = (
            torch.cat([one(batch.input_ids).logits[:, 2:-1].flatten(0, 1).double() for batch in heldout]).log_softmax(1)
            for one in (model, teacher)
        )
    divergence = (theirs.exp() * (theirs - ours)).sum(1).mean()
    assert divergence > 1e-4
    assert context.heldout_figures(model)["heldout_divergence"] == pytest.approx(float(divergence), rel=1e-4)
    assert context.heldout_figures(teacher).keys() == {"heldout_loss"}


def train_in(folder, phase, saved=None, **context):
    """Run a phase with a record in `folder`, from that of the checkpoint `saved`; returns the held-out batches."""
    if not (folder / "start").exists():
        make_moe("qwen3_moe").save_pretrained(folder / "start")
    sequences = draw(4)
    heldout, record = batch_sequences(sequences, 8, 0), Record.open(folder, saved, tensorboard=False)
    base = make_context(TrainConfig(), heldout)
    base = replace(base, text=replace(base.text, train=LoadedText(sequences, {})), record=record)
    stage.run_phase(folder / "start", phase, replace(base, **context), folder / "all")
    return heldout


def test_a_resumed_phase_logs_and_saves_as_often_as_the_new_command_says(tmp_path, monkeypatch):
    phase, saved = Phase("all", 0, 6, frozenset(Part)), []

    def mark(folder):
        saved.append(folder.name)
        if len(saved) == 2:
            raise KeyboardInterrupt
        mark_whole(folder)

    monkeypatch.setattr(loop, "mark_whole", mark)
    with pytest.raises(KeyboardInterrupt):
        train_in(tmp_path, phase, settings=TrainConfig(batch=2, micro_batch=2, log_steps=2, save_steps=2))
    settings = TrainConfig(batch=2, micro_batch=1, log_steps=1, save_steps=3)
    train_in(tmp_path, phase, tmp_path / "all/checkpoint-2", settings=settings)
    assert saved == ["checkpoint-2", "checkpoint-4", "checkpoint-3", "final"]
    assert [line["step"] for line in read_record(tmp_path) if "tokens" in line] == [2, 3, 4, 5, 6]


def test_the_last_heldout_loss_is_that_of_the_checkpoint_in_its_number_format(tmp_path):
    measured, trained = [], []
    for dtype in (torch.float32, torch.bfloat16):
        settings = TrainConfig(batch=2, micro_batch=2, heldout_steps=1, log_steps=1)
        heldout = train_in(tmp_path, Phase("all", 0, 2, frozenset(Part)), settings=settings, total=2, dtype=dtype)
        measured.append([line["heldout_loss"] for line in read_record(tmp_path) if "heldout_loss" in line])
        trained.append(load_file(tmp_path / "all/final/model.safetensors"))
        model = load_whole(tmp_path / "all/final", dtype=torch.float32)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype).float()
        assert measured[-1][-1] == pytest.approx(measure_loss(model, heldout).nats, rel=1e-6)
        shutil.rmtree(tmp_path / "all")
    assert measured[0][0] == measured[1][0]
    assert measured[0][1] != measured[1][1]
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in trained[0])


def step_once(folder, **settings):
    """Weights after one step of two micro-batches, and its loss."""
    settings = TrainConfig(batch=4, micro_batch=2, log_steps=1, **settings)
    train_in(folder, Phase("all", 0, 1, frozenset(Part)), settings=settings)
    weights = load_file(folder / "all/final/model.safetensors")
    shutil.rmtree(folder / "all")
    return weights, [line["loss"] for line in read_record(folder) if "loss" in line]


def test_recomputed_layers_learn_the_same(tmp_path, monkeypatch):
    forward, passes, calls = Qwen3MoeSparseMoeBlock.forward, [], []
    monkeypatch.setattr(Qwen3MoeSparseMoeBlock, "forward", lambda *given: calls.append(1) or forward(*given))
    results = []
    for recomputed in (False, True):
        calls.clear()
        results.append(step_once(tmp_path, gradient_checkpointing=recomputed))
        passes.append(len(calls))
    (plain, losses), (other, same) = results
    assert losses == same
    assert all(torch.equal(plain[name], other[name]) for name in plain)
    assert passes[1] == passes[0] + 2 * 2  # layers, micro-batches


def test_straight_through_routers_learn_otherwise_at_the_same_loss(tmp_path):
    (plain, losses), (other, same) = (step_once(tmp_path, straight_through=how) for how in (False, True))
    assert losses == pytest.approx(same, rel=1e-5)
    routers = [name for name in plain if name.endswith("gate.weight")]
    moved = [(plain[name] - other[name]).abs().amax(1) > 1e-4 for name in routers]
    assert len(routers) == 2
    assert all(rows_E.any() for rows_E in moved)


def test_a_heldout_loss_that_is_no_number_stops_the_training(tmp_path, monkeypatch):
    monkeypatch.setattr(TrainContext, "heldout_figures", lambda *_: {"heldout_loss": math.nan})
    with pytest.raises(NumericsError, match="held-out loss nan after step 1") as caught:
        step_once(tmp_path)
    assert caught.value.do.startswith("lower train.router_rate=")


@pytest.mark.parametrize(
    ("found", "bad", "place"),
    [
        (["first in the output of 0"], (0, 1), "first in the output of 0"),
        ([], (0, 1), "first seen in the gradient of 1.bias"),
        ([], (), "in gradients of another process, or their sum"),
    ],
)
def test_the_place_of_a_gradient_that_is_not_finite_is_named_as_well_as_is_known(tmp_path, found, bad, place):
    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 1))
    model(torch.ones(1, 3)).sum().backward()
    for index in bad:
        next(reversed([*model[index].parameters()])).grad[0] = math.inf
    error = loop.explain_not_finite(model, found, 7, tmp_path / "all")
    assert error.where == f"{place}; last checkpoint: that before training"


def test_without_a_watch_the_first_layer_whose_gradient_is_not_finite_is_named(tmp_path, monkeypatch):
    name, load = "model.layers.0.self_attn.q_proj.weight", stage.load_trainable

    def load_faulty(*arguments, **named):
        model = load(*arguments, **named)
        model.get_parameter(name).requires_grad_().register_hook(lambda gradient: gradient * math.nan)
        return model

    monkeypatch.setattr(stage, "load_trainable", load_faulty)
    with pytest.raises(NumericsError) as caught:
        step_once(tmp_path, watch=False)
    assert caught.value.where.startswith(f"first seen in the gradient of {name}; ")


def test_a_phase_frees_its_model_and_its_optimizer(tmp_path, monkeypatch):
    alive = []

    class Watched(PhaseLoop):
        def run(self, resumed):
            super().run(resumed)
            alive.extend(map(weakref.ref, (self, self.model, self.optimizer)))

    monkeypatch.setattr(stage, "PhaseLoop", Watched)
    gc.disable()
    try:
        train_in(tmp_path, Phase("all", 0, 1, frozenset(Part)), settings=TrainConfig(batch=2, micro_batch=2))
    finally:
        gc.enable()
    assert (tmp_path / "all/final/config.json").exists()
    assert [reference() for reference in alive] == [None] * 3


def test_weights_are_rounded_and_selection_biases_are_not(tmp_path):
    model, bias_E = make_moe("glm4_moe"), torch.tensor([0.1013, -0.0507, 0.0251, -0.0333, 0.0717])
    for router in find_routers(model):
        selection_bias(router).copy_(bias_E)
    model.save_pretrained(tmp_path / "start")
    stage.write_native(model, tmp_path / "start", tmp_path / "out", torch.bfloat16)
    written = load_file(tmp_path / "out/model.safetensors")
    biases = [written.pop(name) for name in sorted(written) if name.endswith("e_score_correction_bias")]
    assert [tensor.tolist() for tensor in biases] == [bias_E.tolist()] * 2
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}


def test_transposed_experts_are_written_as_they_were(tmp_path):
    """transformers reads them, and writes them as they are in memory, which other programs do not read."""
    moe = write_wrapped_carve(tmp_path, "qwen3_vl_moe_text", "qwen3_vl_image", 0)
    model = stage.load_trainable(moe)
    stage.write_native(model, moe, tmp_path / "out", torch.float32)
    wanted, written = load_file(moe / "model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    assert wanted.keys() == written.keys()
    assert all(torch.equal(written[name], wanted[name]) for name in wanted)
    model.save_pretrained(moe)
    with pytest.raises(CheckpointError, match="save_pretrained of transformers wrote the experts"):
        check_carve(moe)


@pytest.mark.parametrize("target", ["qwen3_vl_moe_text", "tiny_onn"])
def test_what_sees_images_is_frozen_since_text_gives_it_no_gradient(tmp_path, target):
    model = stage.load_trainable(write_wrapped_carve(tmp_path, target, "qwen3_vl_image", 0))
    groups = text_groups(model, {"router_rate": 1.0, "expert_rate": 1.0, "rest_rate": 1.0})
    batch = torch.arange(8)[None]
    model(input_ids=batch, labels=batch).loss.backward()
    learning = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert learning == {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert sum(len(group["params"]) for group in groups) == len(learning)
    assert any(not parameter.requires_grad for parameter in model.parameters())


def test_a_model_that_reads_text_alone_learns_whole(tmp_path):
    """transformers takes a head named `decoder` for the decoder."""
    dense = write_checkpoint("modernbert-decoder", tmp_path / "dense")
    model = stage.load_trainable(carve(dense, tmp_path / "moe", "tiny_onn", MoEShape(4, 24, 2, 0)))
    rates = {"router_rate": 1.0, "expert_rate": 1.0, "rest_rate": 1.0}
    text_groups(model, rates)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_batch_that_processes_can_share_stays_as_it_is():
    (error,) = TrainConfig(batch=4, micro_batch=4).contradictions(2)
    assert error.do == "train.micro_batch=2, or train.batch=8"
    (error,) = TrainConfig(batch=4, micro_batch=4).contradictions(8)
    assert error.do == "train.micro_batch=1 train.batch=8, or train.batch=32"


def names(ordered):
    return [sequence.name for sequence in ordered]


def test_every_pass_reads_everything_once_in_an_order_of_its_own():
    read = names(order_sequences(draw(7), 0, 21, seed=4))
    passes = [read[start : start + 7] for start in (0, 7, 14)]
    assert all(sorted(one) == sorted(passes[0]) for one in passes)
    assert len({tuple(one) for one in passes}) == 3
    for first, count in ((9, 12), (12, 1)):  # a later phase goes on where the earlier one stopped
        assert names(order_sequences(draw(7), first, count, seed=4)) == read[first : first + count]


def test_figures_are_saved_with_whole_log_lines():
    settings = TrainConfig(log_steps=4)
    assert [step for step in range(1, 25) if is_due(step, 6, settings)] == [8, 16, 24]
    assert not any(is_due(step, 0, settings) for step in range(1, 9))


@pytest.mark.parametrize(
    ("tokens", "shares", "phases"),
    [
        (1000, (0.2, 0.5, 0.3), [("router", 0, 20), ("experts", 20, 50), ("all", 70, 30)]),
        (100, (0.001, 0.0, 0.999), [("router", 0, 1), ("all", 1, 10)]),  # a small share has a step, one of 0 has none
    ],
)
def test_phases_follow_each_other_and_have_their_share(tokens, shares, phases):
    settings = TrainConfig(tokens=tokens, router_share=shares[0], all_share=shares[2])
    assert settings.experts_share == shares[1]
    found = make_phases(settings, step_tokens=10)
    assert [(phase.name, phase.first, phase.steps) for phase in found] == phases
    assert found[-1].last == sum(phases[-1][1:])


def test_rates_rise_and_fall_within_a_phase():
    settings = TrainConfig(tokens=1000, router_share=1.0, warmup_share=0.1, final_rate=0.2)
    (phase,) = make_phases(settings, 10.0)
    factors = [rate_factor(step, phase, settings) for step in range(phase.steps)]
    assert factors[0] == pytest.approx(1 / 11)
    assert max(factors) == factors[10] == pytest.approx(1.0)
    assert factors[:11] == sorted(factors[:11])
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[-1] == pytest.approx(0.2)
