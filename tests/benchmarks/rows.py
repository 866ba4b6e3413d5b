"""A measured figure, its spread and its target."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from tabulate import tabulate


@dataclass(frozen=True)
class Row:
    """One figure; a ratio if it has no unit."""

    what: str
    values: list[float]  # one per repetition
    at_most: float | None = None  # the target
    at_least: float | None = None
    unit: str = ""
    note: str = ""

    @property
    def measured(self) -> float:
        """The median of the values."""
        return median(self.values)

    @property
    def met(self) -> bool | None:
        """Whether the median meets the target; None without one."""
        if self.at_most is None and self.at_least is None:
            return None
        return (self.at_most is None or self.measured <= self.at_most) and (
            self.at_least is None or self.measured >= self.at_least
        )

    def cells(self) -> list[str]:
        """The cells of its row in the table."""
        targets = {"≤": self.at_most, "≥": self.at_least}
        bounds = [f"{sign} {bound:g}" for sign, bound in targets.items() if bound is not None]
        spread = f"{self._show(min(self.values))} … {self._show(max(self.values))}" if len(self.values) > 1 else ""
        measured = f"{self._show(self.measured)} {self.unit}".strip()
        return [self.what, measured, spread, " ".join(bounds), _MET[self.met], self.note]

    def record(self) -> dict[str, Any]:
        """All fields, for JSON."""
        return asdict(self) | {"measured": self.measured, "met": self.met}

    def _show(self, value: float) -> str:
        return f"{value:.0f}" if self.unit and abs(value) >= 100 else f"{value:.3f}"


_MET = {None: "", True: "yes", False: "no"}


def show_rows(rows: Sequence[Row]) -> str:
    """The table of all rows."""
    headers = ["what", "measured", "spread", "target", "met", "note"]
    return tabulate([row.cells() for row in rows], headers, disable_numparse=True, preserve_whitespace=True)
