"""One value for every layer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stages.plots.chart import draw_x_labels, draw_y_axis, sheet, text, thinned
from stages.plots.markers import draw_marker
from stages.plots.markup import Markup, element, join
from stages.plots.scale import Scale, round_range

TOP, PLOT, BOTTOM, LEFT, RIGHT = 30, 170, 42, 46, 14
MARKERS_FIT = 9  # pixels between layers; closer points are a line alone


@dataclass(frozen=True)
class LayerChart:
    """What is drawn; `reference` is a value to hold the layers against, with its name."""

    title: str
    y_name: str
    values: Sequence[float]
    reference: tuple[float, str] | None = None
    top: float = 0.0  # the axis reaches at least here
    shown: Callable[[float], str] = "{:.4f}".format


def draw_by_layer(chart: LayerChart, width: int) -> Markup:
    """Points joined by a line, layer 0 to the left."""
    last = max(1, len(chart.values) - 1)
    reference = [] if chart.reference is None else [chart.reference[0]]
    ticks = round_range([*chart.values, *reference], count=4, at_least=chart.top)
    y = Scale(ticks[0], ticks[-1], TOP + PLOT, TOP)
    x = Scale(0, last, LEFT + 10, width - RIGHT)
    if len(chart.values) == 1:
        x = Scale(-1, 1, LEFT, width - RIGHT)
    path = " ".join(f"{x(layer):.1f},{y(value):.1f}" for layer, value in enumerate(chart.values))
    size = 3.5 if (x.end - x.start) / last >= MARKERS_FIT else 1.5
    markers = [
        draw_marker("circle", "moe", x(layer), y(value), size=size, hint=f"layer {layer}: {chart.shown(value)}")
        for layer, value in enumerate(chart.values)
    ]
    labels = [(float(layer), str(layer)) for layer in thinned(len(chart.values), x.end - x.start)]
    return sheet(
        width,
        TOP + PLOT + BOTTOM,
        chart.title,
        draw_y_axis(y, ticks, LEFT, width - RIGHT),
        draw_x_labels(x, labels, TOP + PLOT + 14),
        text(LEFT - 40, TOP - 18, chart.y_name, kind="name"),
        text(width - RIGHT, TOP + PLOT + 32, "layer", anchor="end", kind="name"),
        _draw_reference(chart.reference, y, LEFT, width - RIGHT),
        element("polyline", points=path, class_="line moe"),
        *markers,
    )


def _draw_reference(reference: tuple[float, str] | None, y: Scale, left: float, right: float) -> Markup:
    if reference is None:
        return Markup()
    value, name = reference
    return join(
        element("line", x1=left, x2=right, y1=y(value), y2=y(value), class_="reference"),
        text(right, y(value) - 9, name, anchor="end", kind="tick"),
    )
