"""What all charts of the report share: the sheet, its axes, and colours that follow the page's theme.

A chart is drawn for a width in CSS pixels and shown at that width, so that its letters keep their size.
Colours are classes: the page's style sheet gives them a value for light and for dark.
"""

from collections.abc import Callable, Sequence

from stages.plots.markup import Markup, element, join
from stages.plots.scale import Scale, tick_label

# Widths of the figure on a telephone, in half of the page and in all of it; beside them what lies between.
NARROW, HALF, MIDDLE, FULL = 340, 500, 600, 1080
LINE = 16  # pixels from one line of letters to the next
LETTER = 7.2  # pixels of a letter of 13 pixels' height, on average
Draw = Callable[[int], Markup]


def draw_for(widths: Sequence[int], draw: Draw) -> Markup:
    """The chart once for each width, ascending; the style sheet shows the widest that fits its figure."""
    drawn = [element("div", draw(width), class_=f"at-{width}") for width in widths]
    return element("div", *drawn, class_="fitting")


def sheet(width: float, height: float, title: str, *children: str) -> Markup:
    """An SVG image of that size; `title` is read out where the picture cannot be seen."""
    return element(
        "svg", *children, viewBox=f"0 0 {width:.0f} {height:.0f}", width=width, height=height, role="img",
        aria_label=title,
    )  # fmt: skip


def text(x: float, y: float, words: str, *, anchor: str = "start", kind: str = "") -> Markup:
    """Letters whose middle height is at `y`."""
    return element("text", words, x=x, y=y, text_anchor=anchor, class_=kind or None, dominant_baseline="central")


def room_for(names: Sequence[str], most: float) -> float:
    """Pixels for the longest of the names, but no more than `most`."""
    return min(max(map(len, names), default=0) * LETTER, most)


def fitted(name: str, room: float) -> str:
    """The name, cut where there is no room for more."""
    letters = max(1, int(room / LETTER + 1e-6))
    return name if len(name) <= letters else f"{name[: letters - 1].rstrip()}…"


def draw_y_axis(scale: Scale, ticks: list[float], left: float, right: float) -> Markup:
    """Light lines across the plot, their values to the left; the line at 0 is stronger."""
    lines = [
        element("line", x1=left, x2=right, y1=scale(tick), y2=scale(tick), class_="axis" if tick == 0 else "grid")
        for tick in ticks
    ]
    labels = [text(left - 6, scale(tick), tick_label(tick, ticks), anchor="end", kind="tick") for tick in ticks]
    return join(*lines, *labels)


def draw_x_labels(scale: Scale, labels: Sequence[tuple[float, str]], y: float) -> Markup:
    """Values below the plot."""
    return join(*(text(scale(value), y, words, anchor="middle", kind="tick") for value, words in labels))


def thinned(count: int, room: float, *, each: float = 26) -> list[int]:
    """Which of `count` numbered places in `room` pixels get a label: 0, and every so many after it."""
    fit = max(1, int(room // each))
    step = next(step for step in (1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 100, 200, 500, count) if count / step <= fit)
    return list(range(0, count, step))
