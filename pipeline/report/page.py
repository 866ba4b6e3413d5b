"""The whole page: one file without scripts that asks nothing of any network."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.report.chain import Published, read_chain, read_published
from pipeline.report.costs import costs_of
from pipeline.report.evaluations import Evaluation, find_comparable, read_evaluation
from pipeline.report.found import found_section
from pipeline.report.layers import layer_section, neuron_section
from pipeline.report.quality import quality_section, width_section
from pipeline.report.run_record import RunRecord
from pipeline.report.sections import paragraph
from pipeline.report.settings import cost_section, making_section, shape_words
from pipeline.report.training import training_section
from pipeline.report.verdict import key_figures, verdict
from stages.plots.markup import Markup, element, join

STYLE = Path(__file__).with_name("page.css")
FILE = "report.html"
# A browser told this fetches nothing and runs nothing, whatever the page says.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


@dataclass(frozen=True)
class Source:
    """What a page is made from."""

    label: str
    run: RunRecord
    config: str  # the run's settings as YAML
    last: Path  # published folder of the run's last stage
    output_dir: Path


def write_page(source: Source, out: Path) -> Path:
    """Write the page of a run.

    Raises:
        ContractError: the last stage's result cannot be read.
        OSError: the page cannot be written.
    """
    page = draw_page(source)
    new = out.with_name(f".{out.name}.new")
    new.write_text(page, encoding="utf-8")
    new.replace(out)
    return out


def draw_page(source: Source) -> str:
    """The page. Raises ContractError: the last stage's result cannot be read."""
    last = read_published(source.last)
    chain = read_chain(last)
    evaluation = read_evaluation(source.last) if last.stage == "evaluate" else None
    title = f"{source.label} → {heading(last, evaluation)}"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", Markup(STYLE.read_text(encoding="utf-8"))),
    )
    header = draw_header(source.label, heading(last, evaluation), evaluation)
    body = element("body", header, draw_main(source, last, chain, evaluation), draw_footer())
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def heading(last: Published, evaluation: Evaluation | None) -> str:
    """What the source became; where nothing was evaluated, how far the run went."""
    return shape_words(evaluation.shape) if evaluation else last.stage


def draw_header(label: str, title: str, evaluation: Evaluation | None) -> Markup:
    """What was carved into what, and what came of it where that was measured."""
    head = [draw_theme_choice(), paragraph(label, "source"), element("h1", title)]
    if evaluation is None:
        words = "This run evaluated nothing: the page says what its stages found, not what a carve loses."
        return element("header", *head, paragraph(words, "verdict"))
    tiles = [
        element("div", element("dt", meaning), element("dd", figure)) for figure, meaning in key_figures(evaluation)
    ]
    return element("header", *head, paragraph(verdict(evaluation), "verdict"), element("dl", *tiles, class_="tiles"))


def draw_theme_choice() -> Markup:
    """Light, dark or as the system has it, by the style sheet alone."""
    choices = [
        element(
            "label", element("input", type="radio", name_="theme", id=f"theme-{theme}", checked=theme == "auto"), theme
        )
        for theme in ("auto", "light", "dark")
    ]
    return element("fieldset", element("legend", "colours"), *choices, class_="theme")


def draw_main(source: Source, last: Published, chain: Mapping[str, Published], evaluation: Evaluation | None) -> Markup:
    """The sections for which there is something to show."""
    if evaluation is None:
        opening = [found_section(last)]
    else:
        opening = [quality_section(evaluation), width_section(evaluation, find_comparable(evaluation))]
    return element(
        "main",
        *opening,
        training_section(chain.get("train")),
        layer_section(evaluation) if evaluation else "",
        neuron_section(chain),
        cost_section(costs_of(chain, source.run, source.output_dir)),
        making_section(chain, source.run, source.config),
    )


def draw_footer() -> Markup:
    """When the page was made."""
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime())
    return element("footer", paragraph(f"Tiny-ONN; page made {made}."), join(""))
