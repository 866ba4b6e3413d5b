"""Distributions below each other on one axis: where a layer's neurons lie, and how wide."""

from collections.abc import Sequence
from dataclasses import dataclass

from stages.plots.chart import draw_x_labels, sheet, text, thinned
from stages.plots.markup import Markup, element, join
from stages.plots.scale import Scale, round_range, tick_label

TOP, BOTTOM, LEFT, RIGHT = 26, 42, 46, 12
TALLEST = 2.1  # of the rows' distance: ridges may overlap the one above


@dataclass(frozen=True)
class Ridge:
    """One distribution as shares of equal bins between the axis's ends, and its quartiles."""

    shares: Sequence[float]
    quartiles: tuple[float, float, float]


def draw_ridges(title: str, x_name: str, ridges: Sequence[Ridge], ends: tuple[float, float], width: int) -> Markup:
    """One row a distribution, numbered from 0 at the top; each is scaled to the tallest bin of all."""
    row = 46 if len(ridges) <= 6 else 30 if len(ridges) <= 12 else 17
    bottom = TOP + row * (len(ridges) + 1)
    x = Scale(*ends, LEFT, width - RIGHT)
    tallest = max((max(ridge.shares) for ridge in ridges), default=1.0) or 1.0
    ticks = [tick for tick in round_range(ends, count=5) if ends[0] <= tick <= ends[1]]
    labelled = thinned(len(ridges), bottom - TOP, each=16)
    pieces = [_draw_grid(x, tick, TOP, bottom) for tick in ticks]
    bases = [TOP + row * (index + 1.6) for index in range(len(ridges))]
    for index, (ridge, base) in enumerate(zip(ridges, bases, strict=True)):
        pieces.append(_draw_ridge(ridge, x, base, row * TALLEST / tallest, f"layer {index}"))
        if index in labelled:
            pieces.append(text(LEFT - 8, base - 3, str(index), anchor="end", kind="tick"))
    # On top of all ridges, or the next one would hide them.
    pieces += [_draw_middle(ridge, x, base) for ridge, base in zip(ridges, bases, strict=True)]
    labels = [(tick, tick_label(tick, ticks)) for tick in ticks] if len(ticks) > 1 else []
    return sheet(
        width,
        bottom + BOTTOM,
        title,
        *pieces,
        text(6, 8, "layer", kind="name"),
        draw_x_labels(x, labels, bottom + 14),
        text(width - RIGHT, bottom + 32, x_name, anchor="end", kind="name"),
    )


def _draw_grid(x: Scale, tick: float, top: float, bottom: float) -> Markup:
    return element("line", x1=x(tick), x2=x(tick), y1=top, y2=bottom, class_="grid")


def _draw_ridge(ridge: Ridge, x: Scale, base: float, height: float, name: str) -> Markup:
    step = (x.high - x.low) / len(ridge.shares)
    tops = [
        f"{x(x.low + (index + 0.5) * step):.1f} {base - share * height:.1f}" for index, share in enumerate(ridge.shares)
    ]
    path = f"M{x.start:.1f} {base:.1f}L{'L'.join(tops)}L{x.end:.1f} {base:.1f}Z"
    low, median, high = ridge.quartiles
    hint = f"{name}: median {median:.3g}, middle half {low:.3g} to {high:.3g}".replace("-", "−")
    return element("path", element("title", hint), d=path, class_="ridge")


def _draw_middle(ridge: Ridge, x: Scale, base: float) -> Markup:
    """The middle half of the neurons, and the median."""
    low, median, high = ridge.quartiles
    return join(
        element("line", x1=x(low), x2=x(high), y1=base, y2=base, class_="middle"),
        element("line", x1=x(median), x2=x(median), y1=base - 5, y2=base + 2, class_="median"),
    )
