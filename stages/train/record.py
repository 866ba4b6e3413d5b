"""What happened, step by step: metrics.jsonl, which survives a kill and never says a step twice, and TensorBoard."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from instruments.durable import whole_file

logger = logging.getLogger(__name__)

FILE = "metrics.jsonl"
EVENTS = "tensorboard"


@dataclass(frozen=True)
class Record:
    """The file, and TensorBoard events where they are wanted."""

    folder: Path
    events: Any = None  # a SummaryWriter

    @classmethod
    def open(cls, folder: Path, *, done: int, tensorboard: bool) -> "Record":
        """Go on after `done` steps; what was written about later ones, which a kill undid, is forgotten."""
        kept = [line for line in read_record(folder) if line["step"] <= done]
        with whole_file(folder / FILE) as unfinished:
            unfinished.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        return cls(folder, open_events(folder / EVENTS, done) if tensorboard else None)

    def write(self, step: int, phase: str, figures: Mapping[str, float]) -> None:
        """Add a line."""
        self._append({"step": step, "phase": phase, **figures})
        if self.events is not None:
            for name, value in figures.items():
                self.events.add_scalar(name, value, step)

    def warn(self, step: int, phase: str, warnings: Sequence[str]) -> None:
        """Add a line of words, of what is wrong with a step."""
        self._append({"step": step, "phase": phase, "warnings": list(warnings)})

    def _append(self, line: Mapping[str, Any]) -> None:
        with (self.folder / FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Let TensorBoard finish."""
        if self.events is not None:
            self.events.close()


def read_record(folder: Path) -> list[dict[str, Any]]:
    """All lines; a last one that a kill cut short is left out."""
    path = folder / FILE
    if not path.exists():
        return []
    whole = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
    return [json.loads(line) for line in whole]


def open_events(folder: Path, done: int) -> Any:  # noqa: ANN401 - a SummaryWriter, which torch does not type
    """TensorBoard's writer, or None where it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - optional
    except ImportError:
        logger.info("no TensorBoard events: pip install tensorboard; train.tensorboard=false stops asking")
        return None
    return SummaryWriter(str(folder), purge_step=done + 1)


def tokens_at(folder: Path, step: int) -> int:
    """Tokens trained on after a step, by the last line up to it that says so."""
    said = [line["tokens"] for line in read_record(folder) if line["step"] <= step and "tokens" in line]
    return said[-1] if said else 0
