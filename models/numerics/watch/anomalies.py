"""What the monitor finds, in words and for a log."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

NOTE, WARNING, SEVERE = "note", "warning", "severe"


@dataclass(frozen=True)
class Anomaly:
    """One finding of one step."""

    kind: str  # not_finite, skipped, vanishing, exploding, dead_layer, near_limit, loss_scale, falling_scale
    severity: str
    message: str
    where: tuple[str, ...] = ()  # modules, the first or worst one first

    def record(self) -> dict[str, object]:
        """For JSON."""
        return {**vars(self), "where": list(self.where)}


@dataclass(frozen=True)
class StepReport:
    """What was measured in one step; a number that was not there is None."""

    step: int
    loss: float | None
    gradient_norm: float
    loss_scale: float | None
    layers: dict[str, float]  # gradient norm by module, in the order they run
    largest_output: tuple[str, float] | None  # module, value
    anomalies: tuple[Anomaly, ...]

    def record(self, *, layers: bool) -> dict[str, object]:
        """For JSON, which knows neither NaN nor inf: they are written as text that float() reads."""
        facts: dict[str, object] = {"step": self.step, "gradient_norm": as_json(self.gradient_norm)}
        facts |= {"loss": as_json(self.loss)} if self.loss is not None else {}
        facts |= {"loss_scale": as_json(self.loss_scale)} if self.loss_scale is not None else {}
        if self.largest_output is not None:
            name, value = self.largest_output
            facts["largest_output"] = {"module": name, "value": as_json(value)}
        if layers or self.anomalies:
            facts["layers"] = {name: as_json(norm) for name, norm in self.layers.items()}
        return facts | {"anomalies": [anomaly.record() for anomaly in self.anomalies]}


def as_json(value: float) -> float | str:
    """A number, or the text of one that JSON cannot hold."""
    return value if math.isfinite(value) else str(value)


def shown(names: Sequence[str], most: int = 3) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
