"""Values over the tokens that training has seen."""

from collections.abc import Sequence
from dataclasses import dataclass

from stages.plots.chart import LINE, draw_x_labels, draw_y_axis, sheet, text
from stages.plots.markers import draw_marker
from stages.plots.markup import Markup, element
from stages.plots.scale import Scale, round_range, tick_label

TOP, PLOT, BOTTOM, LEFT, RIGHT = 30, 190, 42, 52, 14
LABEL = 70  # pixels between two labels of the tokens


@dataclass(frozen=True)
class Course:
    """One value in the course of training: (tokens seen, value) in order; `kind` gives its colour."""

    name: str
    kind: str
    points: Sequence[tuple[float, float]]


def draw_over_tokens(title: str, y_name: str, courses: Sequence[Course], width: int) -> Markup:
    """Lines from the start of training to its end; with a legend where there are several."""
    drawn = [course for course in courses if course.points]
    points = [point for course in drawn for point in course.points]
    y_ticks = round_range([value for _, value in points], count=4)
    x_ticks = round_range([tokens for tokens, _ in points], count=max(1, int((width - LEFT) // LABEL)))
    bottom = TOP + PLOT
    y = Scale(y_ticks[0], y_ticks[-1], bottom, TOP)
    x = Scale(x_ticks[0], x_ticks[-1], LEFT + 6, width - RIGHT - 14)
    named = drawn if len(drawn) > 1 else []
    return sheet(
        width,
        bottom + BOTTOM + LINE * len(named),
        title,
        draw_y_axis(y, y_ticks, LEFT, width - RIGHT),
        draw_x_labels(x, [(tick, _short(tick, x_ticks)) for tick in x_ticks], bottom + 14),
        text(LEFT - 46, TOP - 18, y_name, kind="name"),
        text(width - RIGHT, bottom + 32, "tokens seen", anchor="end", kind="name"),
        *(_draw_course(course, x, y) for course in drawn),
        *(_draw_name(course, bottom + BOTTOM + LINE * row) for row, course in enumerate(named)),
    )


def _draw_course(course: Course, x: Scale, y: Scale) -> Markup:
    path = " ".join(f"{x(tokens):.1f},{y(value):.1f}" for tokens, value in course.points)
    markers = [
        draw_marker("circle", course.kind, x(tokens), y(value), size=2.5, hint=f"{tokens:,.0f} tokens: {value:.4f}")
        for tokens, value in course.points
    ]
    return element("g", element("polyline", points=path, class_=f"line {course.kind}"), *markers)


def _draw_name(course: Course, y: float) -> Markup:
    line = element("line", x1=LEFT, x2=LEFT + 26, y1=y, y2=y, class_=f"line {course.kind}")
    return element("g", line, text(LEFT + 34, y, course.name, kind=f"label {course.kind}"))


def _short(tokens: float, ticks: list[float]) -> str:
    """Thousands and millions as k and M."""
    size, neuron = (1e6, "M") if ticks[-1] >= 1e6 else (1e3, "k") if ticks[-1] >= 1e4 else (1.0, "")
    return "0" if tokens == 0 else tick_label(tokens / size, [tick / size for tick in ticks]) + neuron
