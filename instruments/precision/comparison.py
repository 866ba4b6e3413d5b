"""Number formats, and the distance between a tensor and its copy in one."""

import math
from dataclasses import dataclass
from enum import StrEnum

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from instruments.errors import ConfigError


@dataclass(frozen=True)
class Distance:
    """Between a reference y and its low-precision ŷ, over the values that are finite in both."""

    normalised_l2: float  # ‖y − ŷ‖ / ‖y‖; infinite where y is all zero and ŷ is not
    max_relative: float  # max|y − ŷ| / max|y|
    cosine: float
    nonfinite: int  # values that are finite in the reference and not here
    reference_nonfinite: int
    largest: float  # max|y|
    size: int  # values compared

    @property
    def sqnr_db(self) -> float:
        """Signal to quantisation noise, −20·log10 of the normalised L2."""
        if not self.normalised_l2:
            return math.inf
        return -20 * math.log10(self.normalised_l2) if math.isfinite(self.normalised_l2) else -math.inf


@torch.no_grad()
def measure_distance(
    reference: Shaped[Tensor, "*shape"], low: Shaped[Tensor, "*shape"], rows: Bool[Tensor, "rows"] | None = None
) -> Distance:
    """Compare two floating-point tensors, in one transfer from their device.

    Args:
        reference: of any floating-point type.
        low: of the same shape, on the same device.
        rows: which vectors of the last axis count; None or another number than there are: all.
    Numerics: differences and sums in float64, so that no square overflows.
    """
    if rows is not None and reference.ndim and reference.numel() == len(rows) * reference.shape[-1]:
        reference, low = (tensor.reshape(len(rows), -1)[rows] for tensor in (reference, low))
    exact, found = reference.double().flatten(), low.double().flatten()
    finite = exact.isfinite()
    both = finite & found.isfinite()
    exact, found = torch.where(both, exact, 0), torch.where(both, found, 0)
    error = (exact - found).abs()
    scales = torch.stack([exact.norm(), found.norm(), error.norm(), exact @ found, both.sum(), finite.sum()])
    largest = torch.stack([error.amax(), exact.abs().amax()]) if exact.numel() else exact.new_zeros(2)
    norm, low_norm, error_norm, product, count, known, max_error, max_exact = torch.cat([scales, largest]).tolist()
    return Distance(
        normalised_l2=_ratio(error_norm, norm),
        max_relative=_ratio(max_error, max_exact),
        cosine=product / (norm * low_norm) if norm and low_norm else float(norm == low_norm),
        nonfinite=int(known - count),
        reference_nonfinite=reference.numel() - int(known),
        largest=max_exact,
        size=int(count),
    )


def _ratio(part: float, whole: float) -> float:
    if whole:
        return part / whole
    return math.inf if part else 0.0


def changed_rows(reference: Shaped[Tensor, "*rows K"], low: Shaped[Tensor, "*rows K"]) -> Bool[Tensor, "flat_rows"]:
    """Where the last axis of two integer tensors holds other values in any order: another choice."""
    first, second = (tensor.reshape(-1, tensor.shape[-1]).sort(dim=-1).values for tensor in (reference, low))
    return (first != second).any(dim=-1)


class Verdict(StrEnum):
    """From harmless to harmful."""

    OK = "ok"
    WARNING = "warning"
    SEVERE = "severe"


# Normalised L2, where there is nothing to measure it against.
WARNING_L2, SEVERE_L2 = 0.01, 0.10
# Times the floor. Rounding every tensor to the nearest gives 0.29 = 1/sqrt(12) of it, and 48 roundings in one module 2.
WARNING_RATIO, SEVERE_RATIO = 2.0, 10.0


def judge(distance: Distance, floor: float | None) -> Verdict:
    """The verdict on one output. Values that are finite in FP32 alone are severe; errors below 1 % never are.

    Args:
        distance: FP32 to low precision.
        floor: normalised L2 of an FP32 run in which every tensor is off by one unit in the last place of that
            precision; None or not finite where there is none: the plain thresholds then stand alone.
    """
    warning, severe = WARNING_L2, SEVERE_L2
    if floor and math.isfinite(floor):
        warning, severe = WARNING_RATIO * floor, max(WARNING_L2, SEVERE_RATIO * floor)
    if distance.nonfinite or not distance.normalised_l2 <= severe:
        return Verdict.SEVERE
    return Verdict.WARNING if distance.normalised_l2 > warning else Verdict.OK


def worst(*verdicts: Verdict) -> Verdict:
    """The most harmful; of none, ok."""
    return max(verdicts, key=[*Verdict].index, default=Verdict.OK)


FORMATS = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}


def find_format(name: str | torch.dtype, setting: str = "precision") -> torch.dtype:
    """The low-precision type of that name, as in "bfloat16" or torch.bfloat16. Raises ConfigError: there is none."""
    name = str(name).removeprefix("torch.")
    if name not in FORMATS:
        raise ConfigError(
            f"{setting}={name} is no low-precision format of this torch",
            where=f"argument {setting}",
            do=f"{setting}= one of {', '.join(FORMATS)}",
        )
    return FORMATS[name]


def name_of(dtype: torch.dtype) -> str:
    """As in "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def ulp(values: Float[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """One unit in the last place of each value in `dtype`; of what that cannot reach, as if it went on."""
    exponent = torch.frexp(values.abs().clamp_min(torch.finfo(dtype).smallest_normal)).exponent - 1
    return torch.ldexp(torch.full_like(values, torch.finfo(dtype).eps), exponent)


def round_to(values: Shaped[Tensor, "*shape"], dtype: torch.dtype) -> Shaped[Tensor, "*shape"]:
    """Each value as `dtype` holds it, in the type it came in."""
    return values.to(dtype).to(values.dtype)


@dataclass(frozen=True)
class AxisRange:
    """max|·| of the slices along one axis."""

    axis: int  # from the end: -1 is the last
    size: int
    largest: float
    largest_at: int
    smallest: float  # above 0
    smallest_at: int
    zero: int  # slices of zeros alone

    @property
    def ratio(self) -> float:
        """Largest over smallest; 1 where there is no value above 0."""
        return self.largest / self.smallest if self.smallest else 1.0

    @property
    def wide(self) -> bool:
        """Whether large numbers may swamp small ones where the two are added up."""
        return self.ratio > 1e4


@torch.no_grad()
def axis_ranges(values: Shaped[Tensor, "..."]) -> list[AxisRange]:
    """One entry for each axis longer than 1, the last axis first; values that are not finite count as 0."""
    if not values.numel():
        return []
    sizes = torch.where(values.isfinite(), values, 0)
    return [_axis_range(sizes, axis) for axis in long_axes(values)]


def long_axes(values: Shaped[Tensor, "..."]) -> list[int]:
    """Axes longer than 1, counted from the end, the last axis first."""
    return [axis for axis in range(-1, -values.ndim - 1, -1) if values.shape[axis] > 1]


def sizes_along(values: Shaped[Tensor, "..."], axis: int, *, keepdim: bool = False) -> Shaped[Tensor, "..."]:
    """max|·| of each slice along an axis, which is counted from the end."""
    others = [other for other in range(values.ndim) if other != axis % values.ndim]
    return values.abs().amax(others, keepdim=keepdim) if others else values.abs()


def _axis_range(sizes: Shaped[Tensor, "..."], axis: int) -> AxisRange:
    by_slice = sizes_along(sizes, axis).double()
    above = torch.where(by_slice > 0, by_slice, torch.inf)
    found = torch.stack([by_slice.amax(), above.amin(), (by_slice == 0).sum(), by_slice.argmax(), above.argmin()])
    largest, smallest, zero, largest_at, smallest_at = found.tolist()
    smallest = smallest if largest else 0.0
    return AxisRange(axis, len(by_slice), largest, int(largest_at), smallest, int(smallest_at), int(zero))
