"""What must not pass silently: modules that never fired, gradients of zeros, values that are not finite, losses."""

from collections import Counter
from dataclasses import dataclass, field

from models.dump.capture import Capture
from models.dump.config import BACKWARD
from models.dump.records import DROPPED, STATISTICS


@dataclass
class Findings:
    """Counted by the writer, capture by capture."""

    captured: Counter[tuple[str, str]] = field(default_factory=Counter)  # (module, tensor) → times
    zero_gradients: list[str] = field(default_factory=list)  # names of records
    nonfinite: list[str] = field(default_factory=list)
    status: Counter[str] = field(default_factory=Counter)
    lost: int = 0  # captured, and then the disk failed

    def add(self, name: str, capture: Capture) -> None:
        """Count one."""
        source, statistics = capture.source, capture.held.statistics
        self.captured[source.module, source.tensor] += 1
        self.status[capture.held.status] += 1
        if statistics is None:
            return
        if statistics.nonfinite:
            self.nonfinite.append(name)
        elif source.direction == BACKWARD and statistics.all_zero:
            self.zero_gradients.append(name)

    @property
    def dropped(self) -> int:
        """Tensors of which nothing was kept for want of memory."""
        return self.status[DROPPED]

    @property
    def measured_only(self) -> int:
        """Tensors of which only statistics were kept."""
        return self.status[STATISTICS]
