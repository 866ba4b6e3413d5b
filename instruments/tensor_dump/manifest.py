"""Expected against captured, when a dump ends."""

import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from instruments.durable import sync
from instruments.tensor_dump.capture import Capture
from instruments.tensor_dump.config import BACKWARD, DumpConfig
from instruments.tensor_dump.records import DROPPED, STATISTICS
from instruments.tensor_dump.watched import Watched


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


logger = logging.getLogger(__name__)
_SHOWN = 5


@dataclass(frozen=True)
class Manifest:
    """What was to be captured by one process, and what was."""

    steps: int  # that were dumped
    expected: dict[str, list[str]]  # module → tensors
    captured: dict[str, dict[str, int]]  # module → tensor → times
    never_fired: list[str]  # modules that gave nothing
    missing: dict[str, list[str]]  # module that fired → tensors that it never gave
    zero_gradients: list[str]  # names of records
    nonfinite: list[str]
    dropped: int
    statistics_only: int
    lost: int  # to a disk that failed
    unseen_weights: list[str]  # matrices that no watched kind of module holds

    @classmethod
    def of(
        cls, watched: Sequence[Watched], findings: Findings, config: DumpConfig, *, steps: int, unseen: Sequence[str]
    ) -> "Manifest":
        """Compare."""
        expected = {one.name: list(one.expected(config)) for one in watched}
        captured = {
            name: {tensor: findings.captured[name, tensor] for tensor in tensors if findings.captured[name, tensor]}
            for name, tensors in expected.items()
        }
        missing = {name: [tensor for tensor in expected[name] if tensor not in captured[name]] for name in expected}
        return cls(
            steps=steps,
            expected=expected,
            captured=captured,
            never_fired=[name for name, found in captured.items() if not found] if steps else [],
            missing={name: tensors for name, tensors in missing.items() if tensors and captured[name]},
            zero_gradients=findings.zero_gradients,
            nonfinite=findings.nonfinite,
            dropped=findings.dropped,
            statistics_only=findings.measured_only,
            lost=findings.lost,
            unseen_weights=list(unseen),
        )

    def write(self, folder: Path, rank: int) -> None:
        """As `manifest-<rank>.json`."""
        path = folder / f"manifest-{rank:05}.json"
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        sync(path)

    def complaints(self, config: DumpConfig) -> list[str]:
        """In words, what the user should know."""
        found = {
            "modules never fired": self.never_fired,
            "modules gave no": [f"{name}: {', '.join(tensors)}" for name, tensors in self.missing.items()],
            "gradients are zero everywhere": self.zero_gradients,
            "tensors hold values that are not finite": self.nonfinite,
        }
        said = [] if self.steps else ["no step was dumped: see first_step and every_steps"]
        said += [f"{len(names)} {what}: {_some(names)}" for what, names in found.items() if names]
        if self.dropped:
            said.append(f"{self.dropped} tensors dropped: the memory of {config.memory_mib} MiB was full")
        if self.statistics_only and config.keep == "tensors":
            said.append(f"of {self.statistics_only} tensors only statistics were kept: the memory was full")
        if self.lost:
            said.append(f"{self.lost} tensors lost to a disk that failed")
        return said


def warn_of(manifest: Manifest, config: DumpConfig, folder: Path) -> None:
    """Say it in the log."""
    for complaint in manifest.complaints(config):
        logger.warning("tensor dump %s: %s", folder, complaint)


def _some(names: Sequence[str]) -> str:
    return "; ".join(names[:_SHOWN]) + (f"; and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
