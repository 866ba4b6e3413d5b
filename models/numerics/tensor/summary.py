"""What tensors lose in low precision as rows, sentences and JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from models.numerics.diff.summary import plain_json
from models.numerics.diff.verdict import Verdict, worst
from models.numerics.tensor.analysis import TensorAnalysis
from models.numerics.tensor.rounding import FormatLoss

COLUMNS = (
    "tensor", "format", "verdict", "underflow", "to zero", "overflow", "L2", "SQNR dB", "sum one by one", "sum fp32",
    "lost addends",
)  # fmt: skip
_MOST_NOTES = 8


def rows_of(found: Sequence[TensorAnalysis]) -> list[tuple[str, ...]]:
    """One for each tensor and format; the worst sum of all its axes."""
    return [_row(tensor, loss) for tensor in found for loss in tensor.losses]


def _row(tensor: TensorAnalysis, loss: FormatLoss) -> tuple[str, ...]:
    sums = [one for one in tensor.reductions if one.format == loss.format]
    bad = max(sums, key=lambda one: one.one_by_one, default=None)
    reduced = (f"{bad.one_by_one:.1g} (dim {bad.axis})", f"{bad.fp32:.1g}", f"{bad.stagnant:.1%}") if bad else ("",) * 3
    return (
        tensor.name, loss.format, str(loss.verdict), f"{loss.underflow:.2%}", f"{loss.flushed:.2%}",
        f"{loss.overflow:,}", f"{loss.normalised_l2:.2g}", f"{loss.sqnr_db:.1f}", *reduced,
    )  # fmt: skip


def notes_of(found: Sequence[TensorAnalysis]) -> list[str]:
    """The verdict, odd values, and what to compute otherwise."""
    by_format: dict[str, list[Verdict]] = {}
    for loss in (loss for tensor in found for loss in tensor.losses):
        by_format.setdefault(loss.format, []).append(loss.verdict)
    verdicts = ", ".join(f"{name} {worst(*verdicts)}" for name, verdicts in by_format.items())
    odd = [f"{tensor.name}: {note}" for tensor in found for note in tensor.notes]
    advice = [f"{tensor.name}: {line}" for tensor in found for line in tensor.advice]
    return [f"worst of {len(found)} tensors: {verdicts}", *_some(odd), *_some(advice)]


def _some(lines: list[str]) -> list[str]:
    rest = len(lines) - _MOST_NOTES
    return lines[:_MOST_NOTES] + ([f"... and {rest} more in analyze_tensor.json"] if rest > 0 else [])


def to_json(found: Sequence[TensorAnalysis]) -> list[dict[str, Any]]:
    """All of it; figures that are not finite as text."""
    return [
        plain_json(
            asdict(tensor)
            | {"verdicts": {loss.format: loss.verdict for loss in tensor.losses}, "advice": tensor.advice}
        )
        for tensor in found
    ]
