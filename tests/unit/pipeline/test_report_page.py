"""The page: complete, safe to open, and clear about missing parts."""

import re
import struct
from html.parser import HTMLParser
from math import inf, nan

import pytest
from unit.pipeline.report_outputs import GAPS, PIXEL, WIDTH, Outputs

from instruments.errors import ContractError
from pipeline.report.__main__ import main
from pipeline.report.evaluations import read_evaluation
from pipeline.report.page import Source, draw_page, find_source
from pipeline.report.sections import costs_of, neurons
from pipeline.run_folder import RunFolder, read_run_record
from pipeline.settings import Settings
from stages.artifacts.carve import Scores

OPEN_ENDED = {"meta", "img", "input"}


class Nesting(HTMLParser):
    """Fails if elements do not close in order; collects names, ids and words."""

    def __init__(self):
        super().__init__()
        self.open, self.names, self.ids, self.words = [], set(), [], []

    def handle_starttag(self, tag, attrs):
        self.names.add(tag)
        self.ids += [value for key, value in attrs if key == "id"]
        assert not [key for key, _value in attrs if key.startswith("on")]
        if tag not in OPEN_ENDED:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.names.add(tag)
        self.ids += [value for key, value in attrs if key == "id"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def read(page):
    nesting = Nesting()
    nesting.feed(page)
    assert nesting.open == []
    assert len(nesting.ids) == len(set(nesting.ids))
    return nesting


@pytest.fixture
def outputs(tmp_path):
    return Outputs(tmp_path)


def test_a_page_has_all_its_sections_and_asks_for_nothing(outputs):
    page = draw_page(find_source(outputs.run(outputs.carve())))
    found = read(page)
    assert {"quality", "width", "layers", "neurons", "cost", "making"} <= set(found.ids)
    assert "script" not in found.names
    assert not re.search(r"""(?:src|href)=["'](?!data:|#)|url\(|@import|https?:""", page)
    for words in ("pico", "+0.0500", "Expert load", "Score by layer: S_p", "Map of layer 2", "busiest expert"):
        assert words in page
    assert "tokens/s" not in page  # a column without values is left out


def test_what_is_not_there_is_left_out(outputs):
    evaluation = outputs.carve(load=False, gaps={"dense": 0.0, "carved": 0.05})
    for name in ("score", "cluster"):
        for file in read_evaluation(evaluation).chain[name].folder.iterdir():
            if file.name != "manifest.json":
                file.unlink()
    found = read(draw_page(find_source(outputs.run(evaluation))))
    assert {"quality", "width", "layers", "cost"} <= set(found.ids)
    assert "neurons" not in found.ids
    assert "Expert load" not in found.words


def test_a_damaged_score_file_is_no_obstacle(outputs):
    evaluation = outputs.carve()
    (read_evaluation(evaluation).chain["score"].folder / Scores.FILE).write_bytes(b"damaged")
    assert "Distribution of S_p" not in draw_page(find_source(outputs.run(evaluation)))


def break_tag(data):
    return data.replace(b'\\"plain\\":', b'\\"plain\\" ', 1)


def put_first(value):
    return lambda data: data[: -4 * WIDTH] + struct.pack("<ff", value, -value) + data[8 - 4 * WIDTH :]


@pytest.mark.parametrize(
    ("damage", "shown"),
    [(break_tag, False), (put_first(nan), False), (put_first(inf), False), (put_first(3e38), True)],
)
def test_scores_without_meaning_are_left_out(outputs, damage, shown):
    chain = read_evaluation(outputs.carve()).chain
    path = chain["score"].folder / Scores.FILE
    data = path.read_bytes()
    path.write_bytes(damage(data))
    assert path.read_bytes() != data
    assert bool(neurons(chain)["scores"]) is shown


def test_foreign_words_stay_words(outputs):
    evil = "<script>alert(1)</script>\"'&"
    gaps = GAPS | {evil: 0.3}
    run = outputs.run(outputs.carve(gaps=gaps), overrides=[f"model.label={evil}"])
    source = find_source(run)
    page = draw_page(Source(evil, source.run, evil, source.last, source.output_dir))
    found = read(page)
    assert "script" not in found.names
    assert evil in "".join(found.words)


def test_passwords_are_left_out(outputs):
    run = outputs.run(outputs.carve(), overrides=["store.url=redis://me:word@host/0"])
    config = (run / "config.yaml").read_text() + "store: {url: 'redis://me:word@host/0'}\n"
    (run / "config.yaml").write_text(config)
    page = draw_page(find_source(run))
    assert "word@" not in page
    assert "redis://me@host/0" in page


def test_kept_stages_cost_what_they_cost_the_run_that_made_them(outputs):
    evaluation = outputs.carve()
    outputs.run(evaluation, name="1", kept=())
    (outputs.folder / "runs" / "1" / "report.md").write_text("# pico\n")
    run = outputs.run(evaluation, name="2", kept=("scan", "score"))
    chain = read_evaluation(evaluation).chain
    costs = costs_of(chain, read_run_record(run), outputs.folder)
    assert [(cost.stage, cost.seconds, cost.here) for cost in costs][:3] == [
        ("scan", 1.0, False),
        ("score", 2.0, False),
        ("cluster", 3.0, True),
    ]
    assert [cost.tokens for cost in costs[:2]] == [900, None]


def test_training_reads_as_many_tokens_as_it_was_asked_to(outputs):
    evaluation = outputs.carve(trained=True, tokens=900)
    run = outputs.run(evaluation, kept=())
    costs = costs_of(read_evaluation(evaluation).chain, read_run_record(run), outputs.folder)
    assert {cost.stage: cost.tokens for cost in costs}["train"] == 5000


def test_costs_of_which_there_is_no_record_are_unknown(outputs):
    evaluation = outputs.carve()
    run = outputs.run(evaluation, kept=("scan",))
    cost = costs_of(read_evaluation(evaluation).chain, read_run_record(run), outputs.folder)[0]
    assert (cost.seconds, cost.peak_bytes, cost.here) == (None, None, False)


def test_the_pictures_are_in_the_page(outputs):
    from base64 import b64encode

    page = draw_page(find_source(outputs.run(outputs.carve())))
    assert f"data:image/png;base64,{b64encode(PIXEL).decode()}" in page


def test_the_command_writes_beside_the_run_or_where_it_is_told(outputs, tmp_path, capsys):
    run = outputs.run(outputs.carve())
    assert main([str(run)]) == 0
    assert main([str(run), "--out", str(tmp_path / "there.html")]) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n{tmp_path / 'there.html'}\n"
    assert (run / "report.html").stat().st_size == (tmp_path / "there.html").stat().st_size


def test_the_command_finds_the_latest_run_of_an_output_folder(outputs, monkeypatch, tmp_path, capsys):
    run, _newer = [outputs.run(outputs.carve(), name=name) for name in ("2", "3")]
    (tmp_path / "latest").symlink_to("runs/2")
    monkeypatch.chdir("/")
    assert main(["latest", "--output-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"


def test_there_is_no_latest_run(tmp_path, capsys):
    assert main(["latest", "--output-dir", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"there is no folder {tmp_path / 'latest'}\n  where: command line\n  do:    ls outputs/runs, or latest\n"
    )


def test_outputs_that_were_moved_are_found(outputs, tmp_path):
    run = outputs.run(outputs.carve())
    moved = tmp_path.with_name(f"{tmp_path.name}-moved")
    outputs.folder.rename(moved)
    source = find_source(moved / run.relative_to(tmp_path))
    assert source.output_dir == moved


def stop_after(outputs, run, stage):
    """Cut the run's record after this stage."""
    record = read_run_record(run)
    names = [done.stage for done in record.stages]
    record.stages = record.stages[: names.index(stage) + 1]
    record.write(run)


@pytest.mark.parametrize(
    ("stage", "sections"),
    [
        ("scan", {"found", "cost", "making"}),
        ("score", {"found", "neurons", "cost", "making"}),
        ("project", {"found", "neurons", "cost", "making"}),
    ],
)
def test_a_run_that_ends_before_an_evaluation_has_a_page_of_what_it_did(outputs, capsys, stage, sections):
    run = outputs.run(outputs.carve())
    stop_after(outputs, run, stage)
    assert main([str(run)]) == 0
    found = read((run / "report.html").read_text())
    assert {name for name in found.ids if not name.startswith(("theme-", "mark-"))} == sections
    assert {f"What {stage} found", f"{stage} 2", stage, "pico"} <= set(found.words)
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"


def test_files_of_the_last_stage_are_listed(outputs):
    run = outputs.run(outputs.carve())
    stop_after(outputs, run, "score")
    assert "scores.safetensors" in read(draw_page(find_source(run))).words


def test_a_run_of_which_nothing_was_finished_is_refused(outputs, capsys):
    run = outputs.run(outputs.carve(), overrides=["stage=scan", "store.url=redis://me:word@host/0"])
    record = read_run_record(run)
    record.stages = []
    record.write(run)
    assert main([str(run)]) == 2
    assert capsys.readouterr().err == (
        "no stage of this run was finished\n"
        f"  where: {run}\n"
        "  do:    python -m pipeline stage=scan store.url=redis://me@host/0\n"
    )


def test_a_result_that_was_removed_is_said(outputs):
    evaluation = outputs.carve()
    run = outputs.run(evaluation)
    (evaluation / "manifest.json").unlink()
    with pytest.raises(ContractError) as error:
        find_source(run)
    assert str(error.value) == (
        f"the result {evaluation.name} of this run's evaluate was removed\n"
        f"  where: {evaluation}\n"
        "  do:    run the command at the head of its report.md again"
    )


def test_a_run_whose_page_cannot_be_drawn_is_no_failure(outputs, caplog):
    evaluation = outputs.carve()
    run_folder = RunFolder(
        outputs.folder / "runs" / "now", Settings(experts=5, n=8, output_dir=str(outputs.folder)), []
    )
    assert run_folder.write_page(evaluation) == run_folder.folder / "report.html"
    (evaluation / "evaluation.json").write_text("damaged")
    assert run_folder.write_page(evaluation) is None
    (said,) = caplog.messages
    assert said.startswith("no report.html: no readable evaluation: JSONDecodeError(")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "there is no folder nowhere\n  where: command line\n  do:    ls outputs/runs, or latest\n"),
        ([".", "--out", "no/x"], "there is no folder no\n  where: no/x\n  do:    mkdir -p no\n"),
        ([".", "--out", "."], ". is a folder\n  where: command line\n  do:    name another output file\n"),
    ],
)
def test_mistakes_on_the_command_line(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert capsys.readouterr().err == message


def test_settings_that_cannot_be_read_are_said(outputs, capsys):
    run = outputs.run(outputs.carve())
    (run / "config.yaml").write_text("a: [")
    assert main([str(run)]) == 1
    assert capsys.readouterr().err.startswith("cannot read the settings of the run: ")


def test_a_trained_checkpoint_shows_how_it_was_trained(tmp_path):
    outputs = Outputs(tmp_path)
    trained, plain = (draw_page(find_source(outputs.run(outputs.carve(trained=trained), name=str(trained))))
                      for trained in (True, False))  # fmt: skip
    nesting = read(trained)
    assert "training" in nesting.ids
    assert {"500 tokens: 0.1250", "900 tokens: −0.0625", "500 tokens: 3.5000"} <= set(nesting.words)
    assert "training" not in read(plain).ids


def test_a_record_that_cannot_be_read_leaves_the_section_out(tmp_path):
    outputs = Outputs(tmp_path)
    source = find_source(outputs.run(outputs.carve(trained=True)))
    (path,) = tmp_path.rglob("metrics.jsonl")
    path.write_text("no record\n")
    assert "training" not in read(draw_page(source)).ids
