"""Named values as horizontal bars, each with its number at the end."""

from collections.abc import Sequence
from dataclasses import dataclass

from stages.plots.chart import LINE, fitted, room_for, sheet, text
from stages.plots.markup import Markup, element, join
from stages.plots.scale import Scale

ROW, THICKNESS = 26, 14
ROOM_FOR_VALUES = 62
MOST_FOR_NAMES = 0.4  # of the width
LETTERS_FIT = 480  # narrower sheets name each bar above it


@dataclass(frozen=True)
class Bar:
    """One value; `shown` is how it is written, `kind` gives the colour."""

    name: str
    value: float
    shown: str
    kind: str


def draw_bars(title: str, bars: Sequence[Bar], width: int) -> Markup:
    """The chart; bars of negative values run to the left of the zero line."""
    aside = width >= LETTERS_FIT
    row = ROW if aside else ROW + LINE
    room = room_for([bar.name for bar in bars], MOST_FOR_NAMES * width if aside else width)
    left = room + 10 if aside else 0
    low, high = min([0.0, *(bar.value for bar in bars)]), max([0.0, *(bar.value for bar in bars)])
    before = ROOM_FOR_VALUES if low < 0 else 2
    x = Scale(low, high if high > low else low + 1.0, left + before, width - ROOM_FOR_VALUES)
    pieces = [_draw_bar(bar, x, index * row, room, aside=aside) for index, bar in enumerate(bars)]
    height = len(bars) * row + 4
    return sheet(width, height, title, *pieces)


def _draw_bar(bar: Bar, x: Scale, top: float, room: float, *, aside: bool) -> Markup:
    y = top + (ROW / 2 if aside else LINE + ROW / 2 - 3)
    start, end = sorted((x(0.0), x(bar.value)))
    name = (
        text(room, y, fitted(bar.name, room), anchor="end", kind="label")
        if aside
        else text(0, top + LINE / 2 + 2, fitted(bar.name, room), kind="label")
    )
    body = element("rect", x=start, y=y - THICKNESS / 2, width=max(end - start, 1), height=THICKNESS,
                   class_=f"bar {bar.kind}")  # fmt: skip
    value = (
        text(end + 6, y, bar.shown, kind="value")
        if bar.value >= 0
        else text(start - 6, y, bar.shown, anchor="end", kind="value")
    )
    reach = ROW / 2 if aside else THICKNESS / 2 + 1  # where names stand above the bars, clear of them
    zero = element("line", x1=x(0.0), x2=x(0.0), y1=y - reach, y2=y + reach, class_="axis")
    return join(name, body, zero, value)
