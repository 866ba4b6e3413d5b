"""Sections on the carve as a whole: what it lost, and what it loses at other widths."""

from collections.abc import Sequence
from dataclasses import replace

from pipeline.report.evaluations import Evaluation
from pipeline.report.groups import Group, curves_of, group_by_seed, relative_to, same_method
from pipeline.report.methods import method_of
from pipeline.report.numbers import nats, percent, plain
from pipeline.report.sections import figure, folded, paragraph, section
from pipeline.report.tables import draw_stage_table, draw_table
from stages.plots.bars import Bar, draw_bars
from stages.plots.chart import FULL, MIDDLE, NARROW, draw_for
from stages.plots.curves import Axes, draw_curves
from stages.plots.markup import Markup

MOST_OTHERS = 40
AXES = Axes(
    title="Loss gap against the share of active FFN neurons, one curve per method",
    x_name="FFN neurons active per token",
    y_name="loss gap, nats per token",
    start=1.0,
    start_name="dense",
)
PARTS = Axes(
    title="Loss gap as a part of the static mask's, one curve per method",
    x_name="FFN neurons active per token",
    y_name="gap ÷ gap of the static mask",
    start=1.0,
)
MASK, MOST = "static_mask", 1.6


def quality_section(evaluation: Evaluation) -> Markup:
    """The table of evaluate, and its gaps as bars."""
    names = list(evaluation.models)
    bars = []
    for name in sorted(names, key=lambda name: evaluation.gap(name) or 0.0):
        method, gap = method_of(name, names), evaluation.gap(name) or 0.0
        if name != "dense":
            bars.append(Bar(method.name, gap, nats(gap), method.kind))
    drawing = draw_for((NARROW, MIDDLE, FULL), lambda width: draw_bars("Loss gap of every model measured", bars, width))
    strong = names.index("carved") if len(names) == len(evaluation.published.manifest.table.rows) else None
    return section(
        "quality",
        "Quality",
        draw_stage_table(evaluation.published.manifest.table, strong=strong),
        figure(
            "Loss gap over the dense model, nats per token",
            drawing,
            "Shorter is better. Pale bars: experts and masks as they were cut, before alignment.",
        ),
    )


def width_section(evaluation: Evaluation, comparable: Sequence[Evaluation]) -> Markup:
    """Curves over active width of this carve, and other carves of the same source beside it."""
    groups = group_by_seed([evaluation, *comparable])
    mine = [group for group in groups if same_method(group, evaluation)]
    others = [group for group in groups if group not in mine]
    names = list(evaluation.models)
    curves = curves_of(mine, names)
    strays = [point for group in others if (point := group.point("carved")) is not None]
    drawing = draw_for((NARROW, MIDDLE, FULL), lambda width: draw_curves(AXES, curves, strays, width))
    return section(
        "width",
        "Gap against active width",
        figure("What fewer active neurons cost", drawing, _caption(mine, others), kind="full"),
        _parts(mine, names) if len(mine) > 1 else "",
        folded("The numbers", _numbers(mine, names)),
        folded(f"Other carves of this model ({len(others)})", _others(others, evaluation)) if others else "",
    )


def _parts(groups: Sequence[Group], names: Sequence[str]) -> Markup:
    """The same gaps as parts of the static mask's: on one scale, however wide the carve."""
    curves = relative_to(groups, MASK, names, MOST)
    if not curves:
        return Markup()
    axes = replace(PARTS, start=max(point.x for curve in curves for point in curve.points))
    drawing = draw_for((NARROW, MIDDLE, FULL), lambda width: draw_curves(axes, curves, [], width))
    caption = f"1 is the static mask of that width. Methods that cost more than {MOST} times as much are left out."
    return figure("Against a static mask of the same width", drawing, caption, kind="full")


def _caption(mine: Sequence[Group], others: Sequence[Group]) -> str:
    seeds = max(len(group.seeds) for group in mine)
    words = "Lower is better. Dashed lines and pale points: before alignment. "
    if len(mine) == 1:
        words += "One width has been evaluated with these settings; active=0.25 and active=0.75 would add two. "
    if seeds > 1:
        words += f"Points are means over up to {seeds} seeds, whiskers reach from the lowest to the highest. "
    if others:
        words += "Small grey points: carves of the same model with other settings or experts."
    return words


def _numbers(groups: Sequence[Group], names: Sequence[str]) -> Markup:
    columns = ["model", *(f"{percent(group.members[0].share)} active" for group in groups)]
    rows = []
    for name in names:
        points = [group.point(name) for group in groups]
        rows.append([method_of(name, names).name, *(nats(point.mean) if point else "–" for point in points)])
    seeds = ["seeds", *(", ".join(map(str, group.seeds)) for group in groups)]
    strong = names.index("carved") if "carved" in names else None
    return draw_table(columns, [*rows, seeds], strong=strong)


def _others(groups: Sequence[Group], wanted: Evaluation) -> Markup:
    columns = ["other settings", "active", "experts", "always on", "seeds", "this MoE", "static mask, aligned"]
    rows = [[_difference(group, wanted), *_figures(group)] for group in groups[:MOST_OTHERS]]
    left = len(groups) - len(rows)
    more = paragraph(f"{left} more are not listed.", "note") if left > 0 else ""
    return Markup(draw_table(columns, rows) + more)


def _figures(group: Group) -> list[str]:
    shape = group.shape
    points = [group.point(name) for name in ("carved", "static_mask_aligned")]
    return [
        percent(group.members[0].share),
        f"{shape.top_k} of {shape.experts} × {shape.n}",
        plain(shape.always_on),
        ", ".join(map(str, group.seeds)),
        *(nats(point.mean) if point else "–" for point in points),
    ]


def _difference(group: Group, wanted: Evaluation) -> str:
    """The settings that are not those of this run."""
    keys = sorted({*group.settings, *wanted.settings})
    words = [
        f"{key}={plain(group.settings.get(key))}" for key in keys if group.settings.get(key) != wanted.settings.get(key)
    ]
    if len(words) > 6:
        words = [*words[:6], f"and {len(words) - 6} more"]
    return ", ".join(words) or "none"
