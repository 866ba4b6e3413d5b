"""The table of a training, from its record."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from stages.contracts.job import Table
from stages.train.phases import Phase

Lines = Sequence[Mapping[str, Any]]
_COLUMNS = (
    "phase", "steps", "tokens", "held-out loss", "gap over dense", "perplexity over dense", "load max/mean",
    "dead experts", "router entropy", "tokens/s",
)  # fmt: skip


def summarise(lines: Lines, phases: Sequence[Phase], text_tokens: int) -> Table:
    """A row for the start and one for the end of every phase, of a training on a text of so many tokens."""
    dense = float(lines[0]["dense_heldout_loss"])
    parts = [("start", 0), *((phase.name, phase.steps) for phase in phases)]
    rows = [_row(name, steps, [line for line in lines if line["phase"] == name], dense) for name, steps in parts]
    gaps = [float(line["heldout_loss"]) - dense for line in lines if "heldout_loss" in line]
    seen = max(int(line.get("tokens", 0)) for line in lines)
    notes = [
        f"dense model: held-out loss {dense:.4f}; {text_tokens:,} tokens of text, read {seen / text_tokens:.1f} times"
    ]
    if gaps[0] > 0:
        notes.append(f"training closed {1 - gaps[-1] / gaps[0]:.0%} of the gap")
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
