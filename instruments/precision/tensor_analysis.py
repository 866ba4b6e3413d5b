"""What a tensor would lose in low precision: value by value, and when it is added up.

found = analyze_tensor(gradient)
print(found.verdict("bfloat16"), *found.advice)
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from instruments.errors import ConfigError
from instruments.precision.comparison import (
    FORMATS,
    AxisRange,
    NumberFormat,
    Verdict,
    axis_ranges,
    find_format,
    measure_distance,
    worst,
)
from instruments.precision.findings import plain_json
from instruments.precision.reduction import ReductionLoss, measure_reductions

# Shares of the values above 0 in size.
WARNING_SHARE, SEVERE_SHARE = 0.01, 0.10


@dataclass(frozen=True)
class FormatLoss:
    """Shares count values that are finite and not 0."""

    format: str
    underflow: float  # below the smallest normal value: digits are lost
    flushed: float  # of them, what becomes 0
    overflow: int  # values beyond the largest one
    normalised_l2: float  # ‖x − x̂‖ / ‖x‖ of those that do not overflow
    max_relative: float  # max|x − x̂| / max|x| of the same
    sqnr_db: float

    @property
    def verdict(self) -> Verdict:
        """Overflow is severe; underflow from a tenth of the values on, and worth a warning from a hundredth."""
        if self.overflow or self.underflow > SEVERE_SHARE:
            return Verdict.SEVERE
        return Verdict.WARNING if self.underflow > WARNING_SHARE else Verdict.OK


@torch.no_grad()
def measure_loss(values: Float[Tensor, "size"], target: NumberFormat) -> FormatLoss:
    """Round finite values to a format, and count.

    Args:
        values: finite, in float32 or float64.
        target: rounding is to the nearest; values that round beyond the largest one overflow.
    """
    sizes = values.abs()
    known = max(1, int((sizes > 0).sum()))
    rounded = target.rounded(values)
    over = (sizes >= target.largest * (1 + target.epsilon / 4)) | ~rounded.isfinite()
    kept = torch.where(over, 0, values)
    distance = measure_distance(kept, torch.where(over, 0, rounded))
    return FormatLoss(
        format=target.name,
        underflow=int(((sizes > 0) & (sizes < target.smallest_normal)).sum()) / known,
        flushed=int(((sizes > 0) & (rounded == 0)).sum()) / known,
        overflow=int(over.sum()),
        normalised_l2=distance.normalised_l2,
        max_relative=distance.max_relative,
        sqnr_db=distance.sqnr_db,
    )


FIRST_OCTAVE, _LAST_OCTAVE = -150, 129  # of the histogram; values outside count in the first or last one


@dataclass(frozen=True)
class TensorAnalysis:
    """Everything about one tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nonfinite: int  # values that are left out of everything else
    zeros: int
    losses: Sequence[FormatLoss]
    reductions: Sequence[ReductionLoss]
    ranges: Sequence[AxisRange]
    octaves: Sequence[int]  # values of size 2^k to 2^(k+1), from k = -150
    notes: Sequence[str] = field(default=())

    def verdict(self, name: str) -> Verdict:
        """In this format."""
        return next(loss.verdict for loss in self.losses if loss.format == name)

    @property
    def advice(self) -> list[str]:
        """What to compute otherwise, and why."""
        sums = [loss.advice for loss in self.reductions if loss.advice]
        return sums + [_swamped(axis, loss) for loss in self.losses for axis in self.ranges if _is_swamped(axis, loss)]


def _is_swamped(axis: AxisRange, loss: FormatLoss) -> bool:
    return axis.ratio > 2 / FORMATS[loss.format].epsilon


def _swamped(axis: AxisRange, loss: FormatLoss) -> str:
    return (
        f"dim {axis.axis} holds up to {axis.largest:.3g} at {axis.largest_at} and {axis.smallest:.3g} at "
        f"{axis.smallest_at}: added up in {loss.format}, the large ones swallow the small ones; scale them apart or "
        "add in fp32"
    )


@torch.no_grad()
def analyze_tensor(
    tensor: Shaped[Tensor, "..."],
    formats: Sequence[str | torch.dtype] = tuple(FORMATS),
    *,
    name: str = "tensor",
) -> TensorAnalysis:
    """Look at a tensor through number formats.

    Args:
        tensor: of floating-point or complex numbers; the latter as pairs along one more axis.
        formats: bfloat16, float16, float8_e4m3fn, float8_e5m2, the last two where torch has them.
        name: what it is called in reports.
    Raises:
        ConfigError: a tensor of integers, or an unknown format.
    """
    targets = [find_format(one, "formats") for one in formats]
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise ConfigError(
            f"{name} holds {str(tensor.dtype).removeprefix('torch.')}, which no floating-point format rounds in use",
            where=f"tensor of shape {tuple(tensor.shape)}",
            do="give a floating-point tensor, or tensor.float()",
        )
    values, notes = _prepare(tensor)
    finite = values.isfinite()
    clean = torch.where(finite, values, 0)
    nonfinite = values.numel() - int(finite.sum())
    notes += [f"{nonfinite:,} of {values.numel():,} values are not finite and left out"] * (nonfinite > 0)
    notes += ["the tensor is empty"] * (not values.numel())
    return TensorAnalysis(
        name,
        tuple(tensor.shape),
        str(tensor.dtype).removeprefix("torch."),
        nonfinite,
        int((values == 0).sum()),
        [measure_loss(clean.flatten(), target) for target in targets],
        [loss for target in targets for loss in _reductions(clean, target)],
        axis_ranges(clean),
        _octaves(clean),
        notes,
    )


def _prepare(tensor: Shaped[Tensor, "..."]) -> tuple[Float[Tensor, "..."], list[str]]:
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj()), ["complex: the last dim holds real and imaginary parts"]
    return (tensor if tensor.dtype == torch.float64 else tensor.float()), []


def _reductions(clean: Float[Tensor, "..."], target: NumberFormat) -> list[ReductionLoss]:
    return measure_reductions(clean, target) if clean.numel() else []


def _octaves(clean: Float[Tensor, "..."]) -> list[int]:
    exponents = torch.frexp(clean[clean != 0]).exponent.long() - 1
    places = exponents.clamp(FIRST_OCTAVE, _LAST_OCTAVE) - FIRST_OCTAVE
    counts: list[int] = torch.bincount(places, minlength=_LAST_OCTAVE - FIRST_OCTAVE + 1).tolist()
    return counts


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
