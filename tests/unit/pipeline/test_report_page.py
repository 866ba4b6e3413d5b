"""The page: complete, safe to open, and clear about missing parts."""

import json
import re
import struct
from base64 import b64decode, b64encode
from html.parser import HTMLParser
from math import inf, nan
from xml.etree import ElementTree

import numpy as np
import pytest
from unit.pipeline.report_outputs import GAPS, PIXEL, WIDTH, Outputs

from instruments.errors import ContractError
from pipeline.report import charts
from pipeline.report.__main__ import main
from pipeline.report.page import Source, draw_page, find_source, read_chain
from pipeline.run_folder import read_run_record
from stages.artifacts.carve import Scores

OPEN_ENDED = {"meta", "img", "source"}
CHARTS = {"Loss gap over the dense model", "Reconstruction error", "Router's agreement with the oracle", "Expert load",
          "Score: S_p"}  # fmt: skip


class Page(HTMLParser):
    """Fails if elements do not close in order; collects elements, words, headings and pictures."""

    def __init__(self, text):
        super().__init__()
        self.open, self.names, self.words, self.titles, self.sections, self.pictures = [], set(), [], set(), [], []
        self.feed(text)
        assert self.open == []
        self.text = " ".join(self.words)

    def handle_starttag(self, tag, attrs):
        self.names.add(tag)
        assert not [key for key, _value in attrs if key.startswith("on") or key == "href"]
        self.pictures += [value for key, value in attrs if key in {"src", "srcset"}]
        if tag not in OPEN_ENDED:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)
        if self.open and self.open[-1] == "h2":
            self.sections.append(data)
        if self.open and self.open[-1] == "h3":
            self.titles.add(data)


def read(run):
    return Page(draw_page(find_source(run)))


@pytest.fixture
def outputs(tmp_path):
    return Outputs(tmp_path)


def folder_of(outputs, stage):
    (path,) = outputs.folder.glob(f"artifacts/*/{stage}/*/manifest.json")
    return path.parent


def test_a_page_has_all_its_sections_and_fetches_nothing(outputs):
    page = read(outputs.run(outputs.carve()))
    assert page.sections == ["Quality", "Layer by layer", "Neurons", "Cost", "Files", "What every stage found",
                             "How it was made"]  # fmt: skip
    assert page.titles == CHARTS | {"Neuron map layer 002"}
    assert "script" not in page.names
    assert all(picture.startswith("data:image/") for picture in page.pictures)
    assert f"data:image/png;base64,{b64encode(PIXEL).decode()}" in page.pictures
    for words in ("pico", "+0.0500", "290 held-out tokens", "python -m pipeline stage=all", "torch"):
        assert words in page.text
    assert "tokens/s" not in page.text  # a column without values is left out
    for words in (
        "5 experts of 8, 2 per token and 4 always-on neurons. Serving each token with 50% of the FFN's 40 neurons ",
        "costs +0.0500 nats per token (perplexity 20.05, dense 20); static mask of the same width: +0.2000;",
    ):
        assert words in page.text


def test_every_chart_is_drawn_for_light_and_dark_pages(outputs):
    page = read(outputs.run(outputs.carve()))
    found = [picture for picture in page.pictures if picture.startswith("data:image/svg+xml;base64,")]
    assert len(found) == len(set(found)) == 2 * len(CHARTS)
    for picture in found:
        text = b64decode(picture.partition(",")[2]).decode()
        ElementTree.fromstring(text)
        assert not re.search(r'(?:xlink:href|src)="(?!#|data:)', text)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({"topology": "global_pool"}, "5 experts of 8 in one pool for all layers, 2 per token and 4 always-on neurons"),
        ({"dense_layers": [1]}, "layers 1 stay dense"),
        ({"always_on": 0}, "5 experts of 8, 2 per token. Serving each token with 40%"),
    ],
)
def test_the_shape_is_described(outputs, shape, words):
    assert words in read(outputs.run(outputs.carve(shape=shape))).text


def test_what_is_missing_is_left_out(outputs):
    evaluation = outputs.carve(load=False, gaps={"dense": 0.0, "carved": 0.05})
    for name in ("score", "cluster"):
        for file in folder_of(outputs, name).iterdir():
            if file.name != "manifest.json":
                file.unlink()
    (folder_of(outputs, "scan") / "manifest.json").unlink()
    page = read(outputs.run(evaluation))
    assert "Neurons" not in page.sections
    assert page.titles == {
        "Loss gap over the dense model",
        "Reconstruction error",
        "Router's agreement with the oracle",
    }
    assert "scan" not in page.words


def break_tag(data):
    return data.replace(b'\\"plain\\":', b'\\"plain\\" ', 1)


def put_first(value):
    return lambda data: data[: -4 * WIDTH] + struct.pack("<ff", value, -value) + data[8 - 4 * WIDTH :]


@pytest.mark.parametrize(
    ("damage", "shown"),
    [
        (lambda _data: b"damaged", False),
        (break_tag, False),
        (put_first(nan), False),
        (put_first(inf), False),
        (put_first(1e20), True),
    ],
)
def test_scores_without_meaning_are_left_out(outputs, damage, shown):
    evaluation = outputs.carve()
    path = folder_of(outputs, "score") / Scores.FILE
    data = path.read_bytes()
    path.write_bytes(damage(data))
    assert path.read_bytes() != data
    assert ("Score: S_p" in read(outputs.run(evaluation)).titles) is shown


@pytest.mark.parametrize("value", [nan, inf, 1e300])
def test_models_without_a_finite_loss_are_drawn(outputs, value):
    assert read(outputs.run(outputs.carve(gaps=GAPS | {"static_mask": value, "cmoe": -value}))).titles >= CHARTS


@pytest.mark.parametrize("layers", [1, 61])
@pytest.mark.parametrize("spread", [1.0, 0.0])
def test_charts_of_any_depth_and_spread(layers, spread):
    values_LF = np.linspace(-spread, spread, 41)[None].repeat(layers, 0)
    assert charts.draw_distributions("t", "c", values_LF).light.startswith("data:image/svg+xml")
    assert charts.draw_loads("t", "c", np.abs(values_LF)) == charts.draw_loads("t", "c", np.abs(values_LF))
    points = [(layer, spread) for layer in range(layers)]
    assert charts.draw_lines("t", "c", {"": points, "none": []}, chance=0.25).title == "t"


def test_foreign_words_stay_words(outputs):
    evil = "<script>alert(1)</script>\"'&$\\frac$"
    run = outputs.run(outputs.carve(gaps=GAPS | {evil: 0.3}), overrides=[f"model.label={evil}"])
    found = Page(draw_page(Source(find_source(run).run, evil, evil, find_source(run).last)))
    assert "script" not in found.names
    assert evil in "".join(found.words)


def test_passwords_are_left_out(outputs):
    run = outputs.run(outputs.carve(), overrides=["store.url=redis://me:word@host/0"])
    config = (run / "config.yaml").read_text() + "store: {url: 'redis://me:word@host/0'}\n"
    (run / "config.yaml").write_text(config)
    page = draw_page(find_source(run))
    assert "word@" not in page
    assert "redis://me@host/0" in page


def test_stages_cost_what_they_cost_this_run(outputs):
    page = read(outputs.run(outputs.carve(), kept=("scan",)))
    cost = page.text[page.text.index("peak memory") : page.text.index("together")].split()
    assert cost[cost.index("scan") :][:3] == ["scan", "kept", "–"]
    assert cost[cost.index("cluster") :][:5] == ["cluster", "3.0", "s", "3.0", "MiB"]
    assert "together 27.0 s" in " ".join(page.text.split())


def test_the_command_writes_into_the_run_folder_or_elsewhere(outputs, tmp_path, capsys):
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


def test_outputs_that_were_moved_are_found(outputs, tmp_path):
    run = outputs.run(outputs.carve())
    moved = tmp_path.with_name(f"{tmp_path.name}-moved")
    outputs.folder.rename(moved)
    assert find_source(moved / run.relative_to(tmp_path)).last.is_relative_to(moved)


@pytest.mark.parametrize(
    ("stage", "sections"), [("scan", []), ("score", ["Neurons"]), ("cluster", ["Neurons"]), ("project", ["Neurons"])]
)
def test_a_run_that_ends_before_an_evaluation_has_a_page_of_its_results(outputs, stage, sections):
    run = outputs.run(outputs.carve())
    record = read_run_record(run)
    names = [done.stage for done in record.stages]
    record.stages = record.stages[: names.index(stage) + 1]
    record.write(run)
    page = read(run)
    files = ["Files"] if stage in {"score", "cluster"} else []
    assert page.sections == [f"What {stage} found", *sections, "Cost", *files, "What every stage found",
                             "How it was made"]  # fmt: skip
    assert {f"{stage} 2", "pico: " + stage} <= set(page.words)
    assert page.pictures.count(f"data:image/png;base64,{b64encode(PIXEL).decode()}") == (
        stage in {"cluster", "project"}
    )


def test_a_run_without_a_finished_stage_is_refused(outputs, capsys):
    run = outputs.run(outputs.carve(), overrides=["stage=scan", "store.url=redis://me:word@host/0"])
    record = read_run_record(run)
    record.stages = []
    record.write(run)
    assert main([str(run)]) == 2
    assert capsys.readouterr().err.startswith(f"no stage of this run was finished\n  where: {run}")


def test_a_removed_result_and_a_damaged_evaluation_are_refused(outputs):
    evaluation = outputs.carve()
    run = outputs.run(evaluation)
    (evaluation / "evaluation.json").write_text("{}")
    with pytest.raises(ContractError, match="no readable evaluation"):
        draw_page(find_source(run))
    (evaluation / "manifest.json").unlink()
    with pytest.raises(ContractError, match=f"the result {evaluation.name} of this run's evaluate was removed"):
        find_source(run)


def test_a_chain_is_read_as_far_as_it_exists(outputs):
    evaluation = outputs.carve()
    assert list(read_chain(evaluation)) == ["scan", "score", "cluster", "extract", "assemble", "project", "evaluate"]
    (folder_of(outputs, "cluster") / "manifest.json").unlink()
    assert "cluster" not in read_chain(evaluation)


def test_mistakes_on_the_command_line(outputs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for words, message in (
        (["nowhere"], "there is no folder nowhere"),
        (["latest", "--output-dir", "here"], "there is no folder"),
        ([".", "--out", "no/x"], "there is no folder no"),
        ([".", "--out", "."], ". is a folder"),
    ):
        assert main(words) == 2
        assert capsys.readouterr().err.startswith(message)
    run = outputs.run(outputs.carve())
    (run / "config.yaml").write_text("a: [")
    assert main([str(run)]) == 1
    assert capsys.readouterr().err.startswith("cannot read the settings of the run: ")


def test_a_trained_checkpoint_shows_its_training(outputs):
    run = outputs.run(outputs.carve(trained=True))
    page = read(run)
    assert {"Loss gap on held-out text", "Expert load"} <= page.titles
    assert {"router", "2.125", "3.5"} <= set(page.words)
    (path,) = outputs.folder.rglob("metrics.jsonl")
    path.write_text(json.dumps({"step": 1}) + "\n")
    assert "Training" not in read(run).sections
