"""The section on continued pretraining, where the evaluated checkpoint went through it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.report.chain import Published
from pipeline.report.sections import figure, folded, section
from pipeline.report.tables import draw_stage_table, draw_table
from stages.plots.chart import HALF, NARROW, draw_for
from stages.plots.markup import Markup, element
from stages.plots.over_tokens import Course, draw_over_tokens

FILE = "metrics.jsonl"
Lines = Sequence[Mapping[str, Any]]


def training_section(published: Published | None) -> Markup:
    """The gap over the dense model and the experts' load by tokens seen, and what each phase came to."""
    lines = [] if published is None else read_lines(published.folder / FILE)
    if published is None or not lines:
        return Markup()
    return section(
        "training",
        "Training",
        element("div", _gap(lines), _load(lines), class_="pair"),
        draw_stage_table(published.manifest.table),
        folded("The numbers", _numbers(lines)),
    )


def read_lines(path: Path) -> Lines:
    """The record of a training; nothing where it cannot be read."""
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        return []


def over_tokens(lines: Lines, name: str) -> list[tuple[float, float]]:
    """(tokens seen, value) wherever the record has both for a step."""
    tokens = {0: 0.0} | {line["step"]: float(line["tokens"]) for line in lines if "tokens" in line}
    return [(tokens[line["step"]], float(line[name])) for line in lines if name in line and line["step"] in tokens]


def _gap(lines: Lines) -> Markup:
    dense = float(lines[0]["dense_heldout_loss"])
    points = [(tokens, loss - dense) for tokens, loss in over_tokens(lines, "heldout_loss")]
    title = "Loss gap on held-out text"
    course = Course("this MoE", "moe", points)
    drawing = draw_for((NARROW, HALF), lambda width: draw_over_tokens(title, "nats over dense", [course], width))
    return figure(title, drawing, "0 is the dense model as it is, which has not been trained on.")


def _load(lines: Lines) -> Markup:
    courses = [
        Course("worst layer", "mask", over_tokens(lines, "load_max_over_mean")),
        Course("mean of layers", "moe", over_tokens(lines, "load_max_over_mean_average")),
    ]
    title = "Expert load"
    drawing = draw_for((NARROW, HALF), lambda width: draw_over_tokens(title, "largest over mean", courses, width))
    return figure(title, drawing, "On the text that is trained on; 1 is an even load.")


def _numbers(lines: Lines) -> Markup:
    keys = ["tokens", "loss", "heldout_loss", "load_max_over_mean", "dead_experts", "router_entropy", "gradient_norm"]
    rows = [[str(line["step"]), str(line["phase"]), *(line.get(key) for key in keys)] for line in lines]
    return draw_table(["step", "phase", *(key.replace("_", " ") for key in keys)], rows)
