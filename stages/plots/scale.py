"""From values to places on the paper, and the round numbers to write beside an axis."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

STEPS = (1, 2, 2.5, 5, 10)


@dataclass(frozen=True)
class Scale:
    """A straight line from values to pixels."""

    low: float
    high: float
    start: float  # pixel of `low`
    end: float  # pixel of `high`

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def round_range(values: Iterable[float], *, count: int = 5, at_least: float = 0.0) -> list[float]:
    """Ticks that hold all values and 0 between the first and the last of them.

    Args:
        values: finite; may be empty.
        count: about how many steps.
        at_least: the last tick is no lower than this.
    """
    known = [value for value in values if math.isfinite(value)]
    low, high = min([0.0, *known]), max([at_least, 0.0, *known])
    if high - low < 1e-12:
        high = low + 1.0
    step = round_step((high - low) / count)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def round_step(rough: float) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten that is no smaller than `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(step * power for step in STEPS if step * power >= rough * (1 - 1e-9))


def tick_label(value: float, ticks: list[float]) -> str:
    """A tick with as many decimals as the step between ticks has."""
    step = ticks[1] - ticks[0]
    decimals = next((places for places in range(9) if math.isclose(round(step, places), step, rel_tol=1e-6)), 9)
    return f"{value:,.{decimals}f}".replace("-", "−")


def spread_apart(places: list[float], gap: float, low: float, high: float) -> list[float]:
    """Move labels as little as needed so that neighbours are `gap` apart, keeping their order and `low`..`high`.

    Where there is no room for all of them, they stay evenly spaced over what there is.
    """
    order = sorted(range(len(places)), key=places.__getitem__)
    gap = min(gap, (high - low) / max(1, len(places) - 1))
    moved = [min(max(places[index], low), high) for index in order]
    for place in range(1, len(moved)):
        moved[place] = max(moved[place], moved[place - 1] + gap)
    if moved:
        moved[-1] = min(moved[-1], high)
    for place in range(len(moved) - 2, -1, -1):
        moved[place] = min(moved[place], moved[place + 1] - gap)
    return [moved[order.index(index)] for index in range(len(places))]
