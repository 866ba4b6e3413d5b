"""What the monitor is held to, what it finds, and the log it writes."""

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

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


@dataclass
class WatchConfig:
    """Thresholds of the monitor, and how much it says."""

    # L2 norm below which a layer's gradient, or that of all layers together, vanishes ...
    vanishing: float = field(default=1e-6, metadata={"minimum": 0})
    # ... and above which it explodes; before clipping, after unscaling.
    exploding: float = field(default=100.0, metadata={"above": 0})
    # A layer is dead whose gradient norm is no more than this share of the median layer's.
    dead: float = field(default=1e-6, metadata={"minimum": 0, "maximum": 1})
    # Look at the outputs of modules: where the first NaN or inf is, how close values are to the end of their format.
    activations: bool = True
    # Share of the largest number of an output's format (float16: 65504) above which its values are too close to it.
    near_limit: float = field(default=0.5, metadata={"above": 0, "maximum": 1})
    # Loss scale below which gradients underflow easily, and at which scaling no longer does anything.
    low_scale: float = field(default=128.0, metadata={"above": 0})
    lost_scale: float = field(default=1.0, metadata={"above": 0})
    # So many falls of the loss scale in a row are no search for its place any more.
    falls: int = field(default=5, metadata={"minimum": 1})
    # Steps after which a finding that lasts is said again.
    repeat_steps: int = field(default=100, metadata={"minimum": 1})
    # Steps between two lines of the log that hold the norm of every layer.
    layer_steps: int = field(default=10, metadata={"minimum": 1})


logger = logging.getLogger(__name__)


class StepLog:
    """The file, and what has been said before."""

    def __init__(self, path: Path | None, config: WatchConfig) -> None:
        """`path` is gone on with where it is there already; None: words alone."""
        self.path, self.config = path, config
        self._said: dict[tuple[str, tuple[str, ...]], int] = {}  # finding → the step it was last said at
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, report: StepReport) -> None:
        """A line, and a warning for each finding that is new or was last said long ago."""
        for anomaly in report.anomalies:
            key = (anomaly.kind, anomaly.where[:1])
            last = self._said.get(key)
            if last is None or report.step - last >= self.config.repeat_steps:
                self._said[key] = report.step
                levels = {NOTE: logging.INFO, SEVERE: logging.ERROR}
                logger.log(levels.get(anomaly.severity, logging.WARNING), "step %d: %s", report.step, anomaly.message)
        if self.path is not None:
            layers = report.step % self.config.layer_steps == 0
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(report.record(layers=layers)) + "\n")


def read_step_log(path: Path) -> list[dict[str, object]]:
    """All whole lines; a last one that a kill cut short is left out."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
