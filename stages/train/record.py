"""Files for resuming after a kill: complete checkpoints, each with the record up to its step."""

import hashlib
import json
import logging
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from instruments.errors import ConfigError
from instruments.files import sync_tree, write_text
from stages.artifacts.job import Table
from stages.text.batches import TokenBatch
from stages.train.objective import Phase

logger = logging.getLogger(__name__)

WHOLE = "whole"  # file that marks a complete checkpoint folder
FILE = "metrics.jsonl"
FINAL = "final"  # folder of a phase's last checkpoint
EVENTS = "tensorboard"


def mark_whole(folder: Path) -> None:
    """Mark a checkpoint as complete, once its files are on the disk."""
    sync_tree(folder)
    write_text(folder / WHOLE, "")


def is_whole(folder: Path) -> bool:
    """Whether the folder was marked by `mark_whole`."""
    return (folder / WHOLE).exists()


def drop_unfinished(folder: Path) -> None:
    """Remove incomplete checkpoints of a phase."""
    for path in folder.glob("*"):
        if path.is_dir() and not is_whole(path):
            shutil.rmtree(path)


def find_latest(folder: Path) -> Path | None:
    """The last complete checkpoint of a phase within it; None if there is none."""
    return max(filter(is_whole, folder.glob("checkpoint-*")), key=saved_step, default=None)


def find_final(scratch: Path) -> Path | None:
    """The last checkpoint of the phase that ended last; None if none has."""
    return max(
        filter(is_whole, scratch.glob(f"*/{FINAL}")), key=lambda path: (path / WHOLE).stat().st_mtime, default=None
    )


def saved_step(checkpoint: Path) -> int:
    """The step of a checkpoint within its phase."""
    return int(checkpoint.name.partition("-")[2])


def drop_older(folder: Path) -> None:
    """Remove the other checkpoints of the phase of the checkpoint `folder`."""
    for path in folder.parent.glob("checkpoint-*"):
        if path != folder:
            shutil.rmtree(path)


@dataclass
class Record:
    """The lines of metrics.jsonl and, on request, TensorBoard events.

    The file can be read while the training runs; a killed training goes on from its copy in a checkpoint.
    """

    folder: Path
    lines: list[dict[str, Any]]
    events: Any  # a SummaryWriter, or None

    @classmethod
    def open(cls, folder: Path, saved: Path | None, *, tensorboard: bool) -> "Record":
        """Go on from the record in the checkpoint `saved`; None: an empty one."""
        lines = read_record(saved) if saved else []
        shutil.rmtree(folder / EVENTS, ignore_errors=True)  # written again from the lines
        record = cls(folder, [], open_events(folder / EVENTS) if tensorboard else None)
        write_text(folder / FILE, "")
        for line in lines:
            record._add(line)
        return record

    def count(self, tokens: int) -> int:
        """All training tokens, with those of a line to come."""
        return tokens + max((int(line["tokens"]) for line in self.lines if "tokens" in line), default=0)

    def write(self, step: int, phase: str, figures: Mapping[str, object]) -> None:
        """Add a line of figures, or of `warnings`."""
        self._add({"step": step, "phase": phase, **figures})

    def _add(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        with (self.folder / FILE).open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(line)}\n")
        for name, value in line.items() if self.events is not None else ():
            if name not in {"step", "phase", "warnings", "heldout_text"}:
                self.events.add_scalar(name, value, line["step"])

    def check_heldout(self, batches: Sequence[TokenBatch]) -> None:
        """Raises ConfigError: the losses so far are of other held-out text."""
        found = hash_text(batches)
        if self.lines and self.lines[0].get("heldout_text", found) != found:
            what = "the training to resume was measured on other held-out text"
            where = "settings data.heldout_path, data.heldout_tokens, train.heldout_sequences, or the files of the text"
            raise ConfigError(what, where=where, do="the held-out text as it was, or fresh=true to begin again")

    def save(self, folder: Path) -> None:
        """Write metrics.jsonl to a checkpoint's folder, or to a result's."""
        write_text(folder / FILE, "".join(f"{json.dumps(line)}\n" for line in self.lines))

    def close(self) -> None:
        """Close the TensorBoard writer."""
        if self.events is not None:
            self.events.close()


def hash_text(batches: Sequence[TokenBatch]) -> str:
    """A short hash of the sequences and of what counts in them, however they are batched."""
    rows = (row for batch in batches for row in zip(batch.input_ids, batch.labels, batch.attention_mask, strict=True))
    found = sorted(repr((ids[mask > 0].tolist(), labels[mask > 0].tolist())) for ids, labels, mask in rows)
    return hashlib.sha256("".join(found).encode()).hexdigest()[:16]


def read_record(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (folder / FILE).read_text(encoding="utf-8").splitlines()]


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
    rows, before = [], 0
    for name, steps in parts:
        own = [line for line in lines if line["phase"] == name]
        rows.append(_row(name, steps, own, dense, before))
        before = max([before, *(int(line["tokens"]) for line in own if "tokens" in line)])
    gaps = [float(line["heldout_loss"]) - dense for line in lines if "heldout_loss" in line]
    seen = max(int(line.get("tokens", 0)) for line in lines)
    notes = [
        f"dense model: held-out loss {dense:.4f}; {text_tokens:,} tokens of text, read {seen / text_tokens:.1f} times"
    ]
    if gaps[-1] <= 0:
        notes.append(f"the MoE is now {-gaps[-1]:.4f} nats below the dense model, which was not trained")
    elif gaps[-1] <= gaps[0]:
        notes.append(f"training closed {1 - gaps[-1] / gaps[0]:.0%} of the gap")
    else:
        notes.append(f"the gap grew from {gaps[0]:+.4f} to {gaps[-1]:+.4f} nats")
    moved = [float(line["heldout_divergence"]) for line in lines if "heldout_divergence" in line]
    if moved and moved[-1] > moved[0]:
        notes.append(
            f"the predictions are further from the dense model's than before training (KL {moved[0]:.4f}, then "
            f"{moved[-1]:.4f}): the rates are too high for so few tokens per step, or the next-token loss outweighs it"
        )
    return Table("continued pretraining", _COLUMNS, rows, notes)


def _row(name: str, steps: int, lines: Lines, dense: float, before: int) -> list[object]:
    last = {key: value for line in lines for key, value in line.items()}
    gap = float(last["heldout_loss"]) - dense
    timed = [(int(line["tokens"]), float(line["tokens_per_second"])) for line in lines if "tokens_per_second" in line]
    counts = [after - earlier for (earlier, _), (after, _) in pairwise([(before, 0.0), *timed])]
    seconds = sum(count / speed for count, (_, speed) in zip(counts, timed, strict=True))  # the last are of few steps
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
        f"{sum(counts) / seconds:,.0f}" if seconds else "-",
    ]
