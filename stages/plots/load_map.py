"""How evenly each layer's experts are used: a row a layer, its experts from the busiest to the idlest."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from stages.plots.chart import LINE, sheet, text, thinned
from stages.plots.markup import Markup, element, join

LEFT, RIGHT, TOP, BOTTOM = 46, 4, 6, 78
# A load of 1 is an even share; the ends hold all beyond them.
BOUNDS = (0.25, 0.5, 0.75, 0.9, 1.1, 4 / 3, 2.0, 4.0)
NAMES = ("¼", "½", "¾", ".9", "1.1", "1⅓", "2", "4")


def load_class(load: float) -> str:
    """Class of the cell: `load-none`, or `load-0` (least) to `load-8` (most), `load-4` about even."""
    return f"load-{sum(load >= bound for bound in BOUNDS)}" if load > 0 else "load-none"


def draw_load_map(title: str, loads: Sequence[Sequence[float]], width: int) -> Markup:
    """The map, with its legend below; loads are times the even share."""
    row = 24 if len(loads) <= 12 else 14
    experts = max((len(layer) for layer in loads), default=1)
    cell = (width - LEFT - RIGHT) / experts
    bottom = TOP + row * len(loads)
    labelled = thinned(len(loads), bottom - TOP, each=15)
    pieces = []
    for index, layer in enumerate(loads):
        y = TOP + row * index
        pieces += [_draw_run(*run, y, row - 2, cell, index) for run in _runs(layer)]
        if index in labelled:
            pieces.append(text(LEFT - 8, y + row / 2 - 1, str(index), anchor="end", kind="tick"))
    return sheet(
        width,
        bottom + BOTTOM,
        title,
        *pieces,
        text(LEFT, bottom + 10, "busiest expert", kind="tick"),
        text(width - RIGHT, bottom + 10, "idlest", anchor="end", kind="tick"),
        _draw_legend(bottom + 32, width),
    )


def _runs(loads: Sequence[float]) -> Iterator[tuple[str, int, list[float]]]:
    """Neighbours of one colour as one rectangle: class, first place, loads."""
    start = 0
    for kind, group in groupby(sorted(loads, reverse=True), key=load_class):
        members = list(group)
        yield kind, start, members
        start += len(members)


def _draw_run(kind: str, start: int, loads: list[float], y: float, height: float, cell: float, layer: int) -> Markup:
    low, high = f"{loads[-1]:.2f}", f"{loads[0]:.2f}"
    many = f"{len(loads)} experts" if len(loads) > 1 else "an expert"
    hint = f"layer {layer}: {many} of load {low}" + (f" to {high}" if high != low else "")
    return element(
        "rect", element("title", hint), x=LEFT + start * cell, y=y, width=len(loads) * cell, height=height,
        class_=f"cell {kind}",
    )  # fmt: skip


def _draw_legend(top: float, width: float) -> Markup:
    """A box for each colour, the bounds below where two of them meet, and apart from these one for no load at all."""
    box = min(30.0, (width - LEFT - RIGHT) / (len(BOUNDS) + 3.5))
    start = LEFT + 2.5 * box
    below = top + 12 + LINE / 2
    boxes = [
        element("rect", x=start + step * box, y=top, width=box, height=12, class_=f"cell load-{step}")
        for step in range(len(BOUNDS) + 1)
    ]
    bounds = [
        text(start + (step + 1) * box, below, name, anchor="middle", kind="tick") for step, name in enumerate(NAMES)
    ]
    return join(
        element("rect", x=LEFT + 1, y=top, width=box - 2, height=12, class_="cell load-none"),
        text(LEFT + box / 2, below, "none", anchor="middle", kind="tick"),
        *boxes,
        *bounds,
        text(start, below + LINE, "load; 1 is an even share", kind="name"),
    )
