"""The page: complete, safe to open, and clear about missing parts."""

import json
import re
from base64 import b64decode, b64encode
from html.parser import HTMLParser
from math import inf, nan
from xml.etree import ElementTree

import pytest
from unit.pipeline.report_outputs import GAPS, PIXEL, Outputs

from pipeline import report
from pipeline.report import draw_page, read_chain

OPEN_ENDED = {"meta", "img", "source"}
CHARTS = {"Reconstruction error", "Router's agreement with the oracle"}


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
    return Page(draw_page(*run))


@pytest.fixture
def outputs(tmp_path):
    return Outputs(tmp_path)


def folder_of(outputs, stage):
    (path,) = outputs.folder.glob(f"artifacts/*/{stage}/*/manifest.json")
    return path.parent


def test_a_page_has_all_its_sections_and_fetches_nothing(outputs):
    page = read(outputs.run(outputs.carve()))
    assert page.sections == ["Quality", "Layer by layer", "Neurons", "Cost", "What every stage found",
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


def test_what_both_models_write_is_side_by_side_and_escaped(outputs):
    evaluation = outputs.carve()
    file = evaluation / "evaluation.json"
    sample = {"prompt": "if a <b", "dense": ":\n    return", "carved": " & c"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"samples": [sample]}))
    text = draw_page(*outputs.run(evaluation))
    assert ">if a &lt;b<b>:\n    return</b></pre>" in text
    assert ">if a &lt;b<b> &amp; c</b></pre>" in text
    page = Page(text)
    assert page.sections[:2] == ["Quality", "What they write"]
    assert {"dense model", "this MoE"} <= page.titles


def test_every_chart_is_a_picture_that_fetches_nothing(outputs):
    page = read(outputs.run(outputs.carve()))
    found = [picture for picture in page.pictures if picture.startswith("data:image/svg+xml;base64,")]
    assert len(found) == len(set(found)) == len(CHARTS)
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
    evaluation = outputs.carve(gaps={"dense": 0.0, "carved": 0.05})
    for name in ("scan", "score", "cluster"):
        (folder_of(outputs, name) / "manifest.json").unlink()
    page = read(outputs.run(evaluation))
    assert "Neurons" not in page.sections
    assert page.titles == {"Reconstruction error", "Router's agreement with the oracle"}
    assert "scan" not in page.words


@pytest.mark.parametrize("value", [nan, inf, 1e300])
def test_models_without_a_finite_loss_are_drawn(outputs, value):
    assert read(outputs.run(outputs.carve(gaps=GAPS | {"static_mask": value, "cmoe": -value}))).titles >= CHARTS


@pytest.mark.parametrize("layers", [1, 61])
@pytest.mark.parametrize("spread", [1.0, 0.0])
def test_charts_of_any_depth_and_spread(layers, spread):
    points = [(layer, spread) for layer in range(layers)]
    picture = report.draw_lines("t", "c", {"": points, "none": []}, chance=0.25).picture
    lines = re.findall('<g clip-path=".*?">(.*?)</g>', b64decode(picture.partition(",")[2]).decode(), re.S)
    assert [line.count("<use ") for line in lines] == [layers]


def test_foreign_words_stay_words(outputs):
    evil = "<script>alert(1)</script>\"'&$\\frac$"
    run = outputs.run(outputs.carve(gaps=GAPS | {evil: 0.3}), overrides=[f"model.label={evil}"])
    found = Page(draw_page(run[0], evil, evil, run[-1]))
    assert "script" not in found.names
    assert evil in "".join(found.words)


def test_passwords_are_left_out(outputs):
    run = outputs.run(outputs.carve(), overrides=["store.url=redis://me:word@host/0"])
    record, label, config, last = run
    page = draw_page(record, label, f"{config}store: {{url: 'redis://me:word@host/0'}}\n", last)
    assert "word@" not in page
    assert "redis://me@host/0" in page


def test_stages_cost_what_they_cost_this_run(outputs):
    page = read(outputs.run(outputs.carve(), kept=("scan",)))
    cost = page.text[page.text.index("peak memory") : page.text.index("together")].split()
    assert cost[cost.index("scan") :][:3] == ["scan", "kept", "–"]
    assert cost[cost.index("cluster") :][:5] == ["cluster", "3.0", "s", "3.0", "MiB"]
    assert "together 27.0 s" in " ".join(page.text.split())


@pytest.mark.parametrize(
    ("stage", "sections"), [("scan", []), ("score", []), ("cluster", []), ("project", ["Neurons"])]
)
def test_a_run_that_ends_before_an_evaluation_has_a_page_of_its_results(outputs, stage, sections):
    record, label, config, _evaluation = outputs.run(outputs.carve())
    page = read((record, label, config, folder_of(outputs, stage)))
    assert page.sections == [f"What {stage} found", *sections, "Cost", "What every stage found", "How it was made"]
    assert {f"{stage} 2", "pico: " + stage} <= set(page.words)
    assert page.pictures.count(f"data:image/png;base64,{b64encode(PIXEL).decode()}") == (
        stage in {"cluster", "project"}
    )


def test_a_chain_is_read_as_far_as_it_exists(outputs):
    evaluation = outputs.carve()
    assert list(read_chain(evaluation)) == ["scan", "score", "cluster", "extract", "assemble", "project", "evaluate"]
    (folder_of(outputs, "cluster") / "manifest.json").unlink()
    assert "cluster" not in read_chain(evaluation)


def test_a_trained_checkpoint_shows_its_training(outputs):
    run = outputs.run(outputs.carve(trained=True))
    page = read(run)
    assert {"Loss gap on held-out text", "Expert load"} <= page.titles
