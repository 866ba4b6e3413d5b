"""Where findings go: a line of JSON for every step, and words for those who watch."""

import json
import logging
from pathlib import Path

from models.numerics.watch.anomalies import NOTE, SEVERE, StepReport
from models.numerics.watch.config import WatchConfig

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
