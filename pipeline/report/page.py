"""The whole page: one file without scripts that asks nothing of any network."""

import time
from dataclasses import dataclass
from pathlib import Path

from pipeline.report.costs import costs_of
from pipeline.report.evaluations import Evaluation, find_comparable, read_evaluation
from pipeline.report.layers import layer_section, unit_section
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
    evaluation: Path  # published folder
    output_dir: Path


def write_page(source: Source, out: Path) -> Path:
    """Write the page of a run.

    Raises:
        ContractError: the evaluation cannot be read.
        OSError: the page cannot be written.
    """
    page = draw_page(source)
    new = out.with_name(f".{out.name}.new")
    new.write_text(page, encoding="utf-8")
    new.replace(out)
    return out


def draw_page(source: Source) -> str:
    """The page. Raises ContractError: the evaluation cannot be read."""
    evaluation = read_evaluation(source.evaluation)
    title = f"{source.label} → {shape_words(evaluation)}"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", Markup(STYLE.read_text(encoding="utf-8"))),
    )
    body = element("body", draw_header(source, evaluation), draw_main(source, evaluation), draw_footer())
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def draw_header(source: Source, evaluation: Evaluation) -> Markup:
    """What was carved into what, and what came of it."""
    tiles = [
        element("div", element("dt", meaning), element("dd", figure)) for figure, meaning in key_figures(evaluation)
    ]
    return element(
        "header",
        draw_theme_choice(),
        paragraph(source.label, "source"),
        element("h1", shape_words(evaluation)),
        paragraph(verdict(evaluation), "verdict"),
        element("dl", *tiles, class_="tiles"),
    )


def draw_theme_choice() -> Markup:
    """Light, dark or as the system has it, by the style sheet alone."""
    choices = [
        element(
            "label", element("input", type="radio", name_="theme", id=f"theme-{theme}", checked=theme == "auto"), theme
        )
        for theme in ("auto", "light", "dark")
    ]
    return element("fieldset", element("legend", "colours"), *choices, class_="theme")


def draw_main(source: Source, evaluation: Evaluation) -> Markup:
    """The sections."""
    return element(
        "main",
        quality_section(evaluation),
        width_section(evaluation, find_comparable(evaluation)),
        training_section(evaluation),
        layer_section(evaluation),
        unit_section(evaluation),
        cost_section(costs_of(evaluation.chain, source.run, source.output_dir)),
        making_section(evaluation, source.run, source.config),
    )


def draw_footer() -> Markup:
    """When the page was made."""
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime())
    return element("footer", paragraph(f"Tiny-ONN; page made {made}."), join(""))
