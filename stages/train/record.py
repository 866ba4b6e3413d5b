"""Files for resuming after a kill: complete checkpoints, and metrics.jsonl with each step once."""

import json
import logging
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from instruments.errors import ContractError
from instruments.files import hash_files, json_text, sync, sync_tree, write_json, write_text
from stages.artifacts.job import Table
from stages.train.phases import Phase

logger = logging.getLogger(__name__)

WHOLE = "whole"  # file that marks a complete checkpoint folder; holds the hashes of its files
FILE = "metrics.jsonl"
CHECKS = "metrics.crc"  # a CRC-32 for each line of FILE, written before the line
EVENTS = "tensorboard"
HELDOUT = "heldout_hash"  # key of the first line


def mark_whole(folder: Path) -> None:
    """Sync the folder to the disk, then write the hashes of its files."""
    sync_tree(folder)
    write_json(folder / WHOLE, hash_files(folder))


def is_whole(folder: Path) -> bool:
    """Whether the folder was marked by `mark_whole`."""
    return (folder / WHOLE).exists()


def drop_unfinished(folder: Path) -> None:
    """Remove incomplete and damaged checkpoints of a phase."""
    for path in folder.glob("*"):
        if path.is_dir() and is_whole(path):
            found = {name: digest for name, digest in hash_files(path).items() if name != WHOLE}
            if (path / WHOLE).read_bytes() == json_text(found).encode():
                continue
            logger.warning("a checkpoint of an unfinished training is damaged and will be removed: %s", path)
        if path.is_dir():
            shutil.rmtree(path)


def find_latest(folder: Path) -> tuple[Path, int] | None:
    """The last complete checkpoint of a phase, and its step within the phase; None if there is none."""
    found = [(int(path.name.partition("-")[2]), path) for path in folder.glob("checkpoint-*") if is_whole(path)]
    if not found:
        return None
    step, path = max(found)
    return path, step


@dataclass
class Record:
    """Writes metrics.jsonl and, on request, TensorBoard events."""

    folder: Path
    events: Any  # a SummaryWriter, or None
    tokens: int  # training tokens so far

    @classmethod
    def open(cls, folder: Path, *, done: int, tensorboard: bool, heldout_hash: str = "") -> "Record":
        """Open the record after `done` steps; removes lines of later steps, which are repeated after a kill.

        Raises:
            ContractError: lines were changed or lost, or they are about another held-out text. The line of a step is
                always written before its checkpoint.
        """
        kept = [line for line in read_record(folder) if line["step"] <= done] if done else []
        if done and not any(line["step"] == done and "tokens" in line for line in kept):
            raise _changed(folder, f"lost its lines up to step {done}, which was saved")
        if kept and kept[0].get(HELDOUT, heldout_hash) != heldout_hash:
            what = "this unfinished training was measured on another held-out text: losses could not be compared"
            do = "the held-out text and train.heldout_sequences= as before, or stage=train fresh=true to start it over"
            raise ContractError(what, where=str(folder / FILE), do=do)
        lines = [f"{json.dumps(line)}\n" for line in kept]
        for name, texts in ((CHECKS, map(_check, lines)), (FILE, lines)):
            write_text(folder / name, "".join(texts))
        tokens = max((line["tokens"] for line in kept if "tokens" in line), default=0)
        # Damaged events cannot be detected, so that all are written again from the lines.
        shutil.rmtree(folder / EVENTS, ignore_errors=True)
        record = cls(folder, open_events(folder / EVENTS) if tensorboard else None, tokens)
        for line in kept:
            record._show(line)
        return record

    def write(self, step: int, phase: str, figures: Mapping[str, float | str]) -> None:
        """Add a line of figures."""
        line = {"step": step, "phase": phase, **figures}
        self._append(line)
        self._show(line)

    def warn(self, step: int, phase: str, warnings: Sequence[str]) -> None:
        """Add a line with the warnings of a step."""
        self._append({"step": step, "phase": phase, "warnings": list(warnings)})

    def _show(self, line: Mapping[str, Any]) -> None:
        """Write the figures of a line to TensorBoard."""
        for name, value in line.items() if self.events is not None else ():
            if name not in {"step", "phase", "warnings", HELDOUT}:
                self.events.add_scalar(name, value, line["step"])

    def _append(self, line: Mapping[str, Any]) -> None:
        text = f"{json.dumps(line)}\n"
        for name, content in ((CHECKS, _check(text)), (FILE, text)):
            with (self.folder / name).open("a", encoding="utf-8") as file:
                file.write(content)

    def sync(self) -> None:
        """Sync the lines to the disk; needed before a checkpoint of their step is marked."""
        for name in (CHECKS, FILE):
            sync(self.folder / name)

    def close(self) -> None:
        """Close the TensorBoard writer."""
        if self.events is not None:
            self.events.close()


def _check(line: str) -> str:
    return f"{crc32(line.encode()):08x}\n"


def read_record(folder: Path) -> list[dict[str, Any]]:
    """All complete lines; a kill may leave incomplete last ones. Raises ContractError: lines were changed."""
    lines, checks = _split(folder / FILE), _split(folder / CHECKS)
    pairs = [*zip(lines, checks, strict=False)]
    # An incomplete line is allowed, unless only its line break is missing: that is a change, not an interrupted write.
    changed = any(
        (line[-1] == "\n") != (check == _check(line)) or (line[-1] != "\n" and check == _check(f"{line[:-1]}\n"))
        for line, check in pairs
    )
    if changed or (lines and not pairs):
        raise _changed(folder, "was changed since it was written")
    return [json.loads(line) for line, _check in pairs if line[-1] == "\n"]


def _changed(folder: Path, how: str) -> ContractError:
    do = "the same command with stage=train fresh=true, which starts it over"
    return ContractError(f"the record of an unfinished training {how}", where=str(folder / FILE), do=do)


def _split(path: Path) -> list[str]:
    """Lines with their line breaks; str.splitlines would also split at other characters."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def open_events(folder: Path) -> Any:  # noqa: ANN401 - a SummaryWriter, which torch does not type
    """TensorBoard's writer, or None if TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - optional
    except ImportError:
        logger.info("no TensorBoard events: pip install tensorboard, or train.tensorboard=false")
        return None
    return SummaryWriter(str(folder))


Lines = Sequence[Mapping[str, Any]]
_COLUMNS = (
    "phase", "steps", "tokens", "held-out loss", "gap over dense", "perplexity over dense", "KL to dense",
    "load max/mean", "dead experts", "router entropy", "tokens/s",
)  # fmt: skip


def summarise(lines: Lines, phases: Sequence[Phase], text_tokens: int) -> Table:
    """One row for the start and one for the end of every phase; `text_tokens` is the length of the text."""
    dense = float(lines[0]["dense_heldout_loss"])
    parts = [("start", 0), *((phase.name, phase.steps) for phase in phases)]
    rows = [_row(name, steps, [line for line in lines if line["phase"] == name], dense) for name, steps in parts]
    gaps = [float(line["heldout_loss"]) - dense for line in lines if "heldout_loss" in line]
    seen = max(int(line.get("tokens", 0)) for line in lines)
    notes = [
        f"dense model: held-out loss {dense:.4f}; {text_tokens:,} tokens of text, read {seen / text_tokens:.1f} times"
    ]
    if gaps[0] > 0:
        closed = 1 - gaps[-1] / gaps[0]
        notes.append(f"training closed {closed:.0%} of the gap" if closed >= 0 else f"the gap grew by {-closed:.0%}")
    moved = [float(line["heldout_divergence"]) for line in lines if "heldout_divergence" in line]
    if moved and moved[-1] > moved[0]:
        notes.append(
            f"the predictions are further from the dense model's than before training (KL {moved[0]:.4f}, then "
            f"{moved[-1]:.4f}): the rates are too high for so few tokens per step, or the next-token loss outweighs it"
        )
    return Table("continued pretraining", _COLUMNS, rows, notes)


def _row(name: str, steps: int, lines: Lines, dense: float) -> list[object]:
    last = {key: value for line in lines for key, value in line.items()}
    gap = float(last["heldout_loss"]) - dense
    speeds = [float(line["tokens_per_second"]) for line in lines if "tokens_per_second" in line]
    return [
        name,
        steps,
        int(last.get("tokens", 0)),
        f"{last['heldout_loss']:.4f}",
        f"{gap:+.4f}",
        f"{math.expm1(gap):+.1%}",
        f"{last['heldout_divergence']:.4f}" if "heldout_divergence" in last else "-",
        f"{last['load_max_over_mean']:.2f}" if "load_max_over_mean" in last else "-",
        last.get("dead_experts", "-"),
        f"{last['router_entropy']:.3f}" if "router_entropy" in last else "-",
        f"{sum(speeds) / len(speeds):,.0f}" if speeds else "-",
    ]


def describe(lines: Lines) -> str:
    """The training in a sentence, for the model card."""
    dense, start = (float(lines[0][name]) for name in ("dense_heldout_loss", "heldout_loss"))
    tokens = max((int(line["tokens"]) for line in lines if "tokens" in line), default=0)
    end = next(float(line["heldout_loss"]) for line in reversed(lines) if "heldout_loss" in line)
    return (
        f"{tokens:,} tokens; held-out loss over the dense model's {start - dense:+.4f} before, {end - dense:+.4f} after"
    )
