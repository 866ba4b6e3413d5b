"""Curves over one quantity that shrinks to the right, each named at its end."""

from collections.abc import Sequence
from dataclasses import dataclass

from stages.plots.chart import LINE, draw_x_labels, draw_y_axis, fitted, room_for, sheet, text
from stages.plots.markers import draw_marker
from stages.plots.markup import Markup, element, join
from stages.plots.scale import Scale, round_range, spread_apart

TOP, BOTTOM, LEFT = 30, 46, 46
MOST_FOR_NAMES = 0.36  # of the width
LETTERS_FIT = 480  # narrower sheets name the curves below the plot


@dataclass(frozen=True)
class Point:
    """What was found at one place: the mean of `count` repetitions, and their lowest and highest."""

    x: float
    mean: float
    low: float
    high: float
    count: int = 1


@dataclass(frozen=True)
class Curve:
    """Points from the largest x to the smallest; `kind` gives colour and line, `marker` the shape of its points."""

    name: str
    kind: str
    marker: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Axes:
    """What the axes say; x runs from `start` on the left to the smallest value on the right.

    `start_name` is what stands at `start` and 0, if anything does.
    """

    title: str
    x_name: str
    y_name: str
    start: float
    start_name: str = ""


def draw_curves(axes: Axes, curves: Sequence[Curve], strays: Sequence[Point], width: int) -> Markup:
    """The chart; `strays` are single points that belong to no curve."""
    drawn = [curve for curve in curves if curve.points]
    aside = width >= LETTERS_FIT
    plot = 340 if width > 800 else 300 if aside else 240
    height = TOP + plot + BOTTOM + (0 if aside else LINE * len(drawn) + 8)
    points = [*(point for curve in drawn for point in curve.points), *strays]
    ticks = round_range([value for point in points for value in (point.low, point.high)])
    y = Scale(ticks[0], ticks[-1], TOP + plot, TOP)
    room = room_for([curve.name for curve in drawn], MOST_FOR_NAMES * width)
    right = width - (room + 22 if aside else 16)
    x = Scale(*_ends(axes.start, [point.x for point in points]), LEFT + 14, right - 6)
    return sheet(
        width,
        height,
        axes.title,
        _draw_frame(axes, x, y, ticks, points, right),
        *(_draw_curve(curve, x, y) for curve in drawn),
        *(draw_marker("circle", "other", x(point.x), y(point.mean), size=3) for point in strays),
        _name_at_ends(drawn, x, y, right, room) if aside else _name_below(drawn, TOP + plot + BOTTOM),
    )


def _ends(start: float, places: Sequence[float]) -> tuple[float, float]:
    """Ends of the x axis: from `start`, unless all points stand far from it and close together."""
    first, last = max(places, default=start), min(places, default=start / 2)
    if first > last and start - first > 2 * (first - last):
        return first + 0.1 * (first - last), last
    return start, last if last < start else 0.0


def _draw_frame(axes: Axes, x: Scale, y: Scale, ticks: list[float], points: Sequence[Point], right: float) -> Markup:
    bottom = max(y(ticks[0]), y(ticks[-1]))
    places = sorted({*([axes.start] if x.low == axes.start else []), *(point.x for point in points)}, reverse=True)
    labels: list[tuple[float, str]] = []
    for place in places:
        if not labels or x(place) - x(labels[-1][0]) > 34:
            labels.append((place, f"{100 * place:.0f}\N{NO-BREAK SPACE}%"))
    origin = x.start
    starts = bool(axes.start_name) and x.low == axes.start
    return join(
        draw_y_axis(y, ticks, LEFT, right),
        draw_x_labels(x, labels, bottom + 14),
        text(LEFT - 40, TOP - 18, axes.y_name, kind="name"),
        text(right, bottom + 33, axes.x_name, anchor="end", kind="name"),
        draw_marker("circle", "dense", origin, y(0.0), size=4.5) if starts else "",
        text(origin - 2, y(0.0) - 14, axes.start_name, kind="tick") if starts else "",
    )


def _draw_curve(curve: Curve, x: Scale, y: Scale) -> Markup:
    path = " ".join(f"{x(point.x):.1f},{y(point.mean):.1f}" for point in curve.points)
    line = element("polyline", points=path, class_=f"line {curve.kind}") if len(curve.points) > 1 else ""
    whiskers = [_draw_whisker(curve.kind, x(point.x), y(point.low), y(point.high)) for point in curve.points]
    markers = [
        draw_marker(curve.marker, curve.kind, x(point.x), y(point.mean), hint=_hint(curve, point))
        for point in curve.points
    ]
    return element("g", line, *whiskers, *markers)


def _draw_whisker(kind: str, x: float, low: float, high: float) -> Markup:
    if low - high < 0.5:  # pixels; nothing to see
        return Markup()
    return element("path", d=f"M{x:.1f} {low:.1f}V{high:.1f}M{x - 4:.1f} {low:.1f}h8M{x - 4:.1f} {high:.1f}h8",
                   class_=f"whisker {kind}")  # fmt: skip


def _hint(curve: Curve, point: Point) -> str:
    spread = f", {point.low:+.4f} to {point.high:+.4f} over {point.count}" if point.count > 1 else ""
    return f"{curve.name}, {100 * point.x:.0f}\N{NO-BREAK SPACE}%: {point.mean:+.4f}{spread}".replace("-", "−")


def _name_at_ends(curves: Sequence[Curve], x: Scale, y: Scale, right: float, room: float) -> Markup:
    """Names beside the last points, pushed apart where they would overlap, with a thin line to the point."""
    ends = [y(curve.points[-1].mean) for curve in curves]
    places = spread_apart(ends, LINE, min(y.start, y.end), max(y.start, y.end) + LINE)
    pieces = []
    for curve, end, place in zip(curves, ends, places, strict=True):
        start = x(curve.points[-1].x) + 7
        pieces += [
            element("polyline", points=f"{start:.1f},{end:.1f} {right + 4:.1f},{end:.1f} {right + 12:.1f},{place:.1f}",
                    class_="leader"),
            text(right + 16, place, fitted(curve.name, room), kind=f"label {curve.kind}"),
        ]  # fmt: skip
    return join(*pieces)


def _name_below(curves: Sequence[Curve], top: float) -> Markup:
    """One line a curve, highest end first."""
    ordered = sorted(curves, key=lambda curve: -curve.points[-1].mean)
    pieces = []
    for row, curve in enumerate(ordered):
        y = top + row * LINE + 4
        pieces += [
            element("line", x1=LEFT, x2=LEFT + 26, y1=y, y2=y, class_=f"line {curve.kind}"),
            draw_marker(curve.marker, curve.kind, LEFT + 13, y),
            text(LEFT + 34, y, curve.name, kind=f"label {curve.kind}"),
        ]
    return join(*pieces)
