"""Errors of a tensor in low precision: from rounding each value, and in sums."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from instruments.dtypes import dtype_name
from instruments.errors import ConfigError, align
from instruments.files import plain_json
from instruments.precision import comparison
from instruments.precision.comparison import FORMATS, AxisRange, find_format, measure_distance, round_to
from instruments.precision.verdict import Verdict, worst
from instruments.shapes import Float, Shaped

# Addends of a sum; of a longer axis only the first ones are added.
LONGEST = 16384
# Values to add; of a larger tensor only some sums are computed.
_MOST = 2**21
WORTH_A_WORD = 0.01


@dataclass(frozen=True)
class ReductionLoss:
    """Errors of sums along one axis: normalised L2 over all sums, infinite if one overflows."""

    format: str
    axis: int  # from the end: -1 is the last
    length: int  # addends of a sum
    one_by_one: float  # in sequence, every addition rounded
    fp32: float  # in FP32, from the unrounded values
    torch_sum: float | None  # torch.sum in the format, which adds in FP32; None if torch has none
    stagnant: float  # share of nonzero addends that are too small to change the partial sum

    @property
    def advice(self) -> str:
        """What to do if a sum in the format is off by more than 1 % and FP32 is ten times better; else empty."""
        if not self._bad(self.one_by_one) and not self._bad(self.torch_sum):
            return ""
        lost = f", {self.stagnant:.0%} of the addends lost" if self.stagnant > WORTH_A_WORD else ""
        errors = f"error {self.one_by_one:.1g} → {self.fp32:.1g}"
        torch_sum = "" if self.torch_sum is None else f"; torch.sum, which adds in fp32: {self.torch_sum:.1g}"
        return f"sum over dim {self.axis} in fp32: {errors} ({self.format} one by one{lost}{torch_sum})"

    def _bad(self, error: float | None) -> bool:
        return error is not None and error > WORTH_A_WORD and self.fp32 * 10 <= error


def _measure_sums(values: Float[Tensor, "..."], axis: int, target: torch.dtype) -> ReductionLoss:
    """Measure sums of finite values along an axis; addends and every partial sum are rounded to `target`."""
    length = min(values.shape[axis], LONGEST)
    addends_NS = values.movedim(axis, 0)[:length].reshape(length, -1)
    addends_NS = addends_NS[:, :: -(-addends_NS.numel() // _MOST)].float()
    exact_S = addends_NS.double().sum(0)
    rounded_NS = round_to(addends_NS, target)
    sums_S, stagnant = _add_one_by_one(rounded_NS, target)
    return ReductionLoss(
        dtype_name(target), axis, length,
        one_by_one=_error(exact_S, sums_S),
        fp32=_error(exact_S, addends_NS.sum(0)),
        torch_sum=_error(exact_S, rounded_NS.to(target).sum(0)) if target.itemsize > 1 else None,
        stagnant=stagnant,
    )  # fmt: skip


def _error(exact_S: Float[Tensor, "S"], found_S: Float[Tensor, "S"]) -> float:
    distance = measure_distance(exact_S, found_S)
    return float("inf") if distance.nonfinite else distance.normalised_l2


def _add_one_by_one(addends_NS: Float[Tensor, "N S"], target: torch.dtype) -> tuple[Float[Tensor, "S"], float]:
    """The sums, and the share of nonzero addends that are too small to change the partial sum."""
    sum_S = torch.zeros_like(addends_NS[0])
    lost_S = torch.zeros_like(sum_S)
    for addend_S in addends_NS:
        moved_S = round_to(sum_S + addend_S, target)
        lost_S += (moved_S == sum_S) & (addend_S != 0)
        sum_S = moved_S
    return sum_S, float(lost_S.sum() / (addends_NS != 0).sum().clamp_min(1))


# Shares of the nonzero values.
WARNING_SHARE, SEVERE_SHARE = 0.01, 0.10
AMAX = "amax"


@dataclass(frozen=True)
class FormatLoss:
    """Loss from rounding to a format. Shares are those of the finite nonzero values."""

    format: str
    underflow: float  # at most half the smallest subnormal value: rounded to 0
    flushed: float  # below the smallest normal value: digits are lost, or all if subnormals are flushed to 0
    overflow: int  # values of at least the format's largest plus half a unit in its last place
    normalised_l2: float  # ‖x − x̂‖ / ‖x‖ of the values that do not overflow
    sqnr_db: float
    scale: float = 1.0  # factor applied before rounding

    @property
    def verdict(self) -> Verdict:
        """Judge the loss in IEEE arithmetic: overflow, underflow of many values, or loss of much of the norm."""
        if self.overflow or self.underflow > SEVERE_SHARE or self.normalised_l2 > SEVERE_SHARE:
            return Verdict.SEVERE
        return Verdict.WARNING if self.underflow > WARNING_SHARE else Verdict.OK


def _measure_rounding(values: Float[Tensor, "size"], target: torch.dtype, scale: str | None) -> FormatLoss:
    """Round finite values to the nearest number of a format."""
    limits = torch.finfo(target)
    largest = float(values.abs().max()) if values.numel() else 0.0
    factor = limits.max / largest if scale == AMAX and largest else 1.0
    values = values.double() * factor
    sizes = values.abs()
    known = max(1, int((sizes > 0).sum()))
    # Not left to torch: by version, too large values become inf, NaN or the largest number.
    over = sizes >= limits.max + math.ldexp(limits.eps, math.frexp(limits.max)[1] - 1) / 2
    distance = measure_distance(torch.where(over, 0, values), torch.where(over, 0, round_to(values.float(), target)))
    return FormatLoss(
        dtype_name(target),
        underflow=int(((sizes > 0) & (sizes <= limits.smallest_normal * limits.eps / 2)).sum()) / known,
        flushed=int(((sizes > 0) & (sizes < limits.smallest_normal)).sum()) / known,
        overflow=int(over.sum()), normalised_l2=distance.normalised_l2, sqnr_db=distance.sqnr_db, scale=factor,
    )  # fmt: skip


@dataclass(frozen=True)
class TensorAnalysis:
    """Result of `analyze_tensor`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nonfinite: int  # values, left out of all other figures
    losses: Sequence[FormatLoss]
    reductions: Sequence[ReductionLoss]
    ranges: Sequence[AxisRange]
    notes: Sequence[str] = field(default=())

    def verdict(self, name: str) -> Verdict:
        """Verdict for a format; "bf16" is "bfloat16"."""
        return next(loss.verdict for loss in self.losses if loss.format == dtype_name(find_format(name)))

    def __str__(self) -> str:
        return "\n".join([*align([COLUMNS, *rows_of([self])]), *map(str, self.ranges), *notes_of([self])])

    @property
    def advice(self) -> list[str]:
        """What to compute in another way, and why."""
        return [loss.advice for loss in self.reductions if loss.advice]


@torch.no_grad()
def analyze_tensor(
    tensor: Shaped[Tensor, "..."],
    formats: Sequence[str | torch.dtype] = tuple(FORMATS),
    *,
    target_dtype: str | torch.dtype | None = None,
    scale: str | None = None,
    name: str = "tensor",
) -> TensorAnalysis:
    """Measure what a tensor loses in number formats.

    Raises ConfigError: no dense floating-point tensor, or an unknown format or scale.

    Args:
        tensor: floating-point and dense.
        formats: bfloat16 (bf16), float16 (fp16), float8_e4m3fn, float8_e5m2.
        target_dtype: a single format, instead of `formats`.
        scale: "amax": first multiply so that the largest value becomes the format's, as usual in FP8; not for sums.
        name: of the tensor in reports.
    """
    formats = formats if target_dtype is None else [target_dtype]
    targets = [find_format(one) for one in formats]
    if scale not in {None, AMAX}:
        raise ConfigError(f"scale={scale} is no way to scale", where="argument scale", do="scale='amax', or None")
    if not tensor.is_floating_point() or tensor.layout is not torch.strided:
        what = f"{name} is {tensor.layout} of {tensor.dtype}, no dense floating-point tensor"
        do = "tensor.to_dense().float(), or torch.view_as_real(tensor)"
        raise ConfigError(what, where=f"tensor of shape {tuple(tensor.shape)}", do=do)
    values = tensor if tensor.dtype == torch.float64 else tensor.float()
    finite = values.isfinite()
    clean = torch.where(finite, values, 0)
    nonfinite = values.numel() - int(finite.sum())
    notes = [f"{nonfinite:,} of {values.numel():,} values are not finite and left out"] * (nonfinite > 0)
    notes += ["the tensor is empty"] * (not values.numel())
    axes = comparison.long_axes(clean) if clean.numel() else []
    return TensorAnalysis(
        name, tuple(tensor.shape), dtype_name(tensor.dtype), nonfinite,
        [_measure_rounding(clean.flatten(), target, scale) for target in targets],
        [_measure_sums(clean, axis, target) for target in targets for axis in axes],
        comparison.axis_ranges(clean), notes,
    )  # fmt: skip


COLUMNS = (
    "tensor", "format", "verdict", "underflow", "subnormal", "overflow", "L2", "SQNR dB", "sum one by one", "torch.sum",
    "sum fp32", "lost addends",
)  # fmt: skip
_MOST_NOTES = 8


def rows_of(found: Sequence[TensorAnalysis]) -> list[tuple[str, ...]]:
    """One row for each tensor and format, with the worst sum of all axes."""
    return [_row(tensor, loss) for tensor in found for loss in tensor.losses]


def _row(tensor: TensorAnalysis, loss: FormatLoss) -> tuple[str, ...]:
    sums = [one for one in tensor.reductions if one.format == loss.format]
    bad = max(sums, key=lambda one: one.one_by_one, default=None)
    reduced = ("",) * 4
    if bad:
        ours = "" if bad.torch_sum is None else f"{bad.torch_sum:.1g}"
        reduced = (f"{bad.one_by_one:.1g} (dim {bad.axis})", ours, f"{bad.fp32:.1g}", f"{bad.stagnant:.1%}")
    return (
        tensor.name, loss.format, str(loss.verdict), f"{loss.underflow:.2%}", f"{loss.flushed:.2%}",
        f"{loss.overflow:,}", f"{loss.normalised_l2:.2g}", f"{loss.sqnr_db:.1f}", *reduced,
    )  # fmt: skip


def notes_of(found: Sequence[TensorAnalysis]) -> list[str]:
    """The worst verdicts, notes on values, and advice."""
    worst_of: dict[str, Verdict] = {}
    for loss in (loss for tensor in found for loss in tensor.losses):
        worst_of[loss.format] = worst(loss.verdict, worst_of.get(loss.format, Verdict.OK))
    verdicts = ", ".join(f"{name} {verdict}" for name, verdict in worst_of.items())
    lines = [f"worst of {len(found)} tensors: {verdicts}"]
    for kind in ("notes", "advice"):
        said = [f"{tensor.name}: {line}" for tensor in found for line in getattr(tensor, kind)]
        rest = len(said) - _MOST_NOTES
        lines += said[:_MOST_NOTES] + [f"... and {rest} more in analyze_tensor.json"] * (rest > 0)
    return lines


def to_json(found: Sequence[TensorAnalysis]) -> list[dict[str, Any]]:
    """All results; non-finite figures as text."""
    judged = [{"verdicts": {loss.format: loss.verdict for loss in one.losses}, "advice": one.advice} for one in found]
    return [plain_json(asdict(one) | more) for one, more in zip(found, judged, strict=True)]
