"""Number formats, and the distance of a tensor from its low-precision version."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from instruments.dtypes import dtype_name
from instruments.errors import ConfigError
from instruments.shapes import Bool, Float, Shaped


@dataclass(frozen=True)
class Distance:
    """Distance between a reference y and its low-precision ŷ, over the values that are finite in both."""

    normalised_l2: float  # ‖y − ŷ‖ / ‖y‖; infinite if y is all zero and ŷ is not
    max_abs: float  # max|y − ŷ|
    max_relative: float  # the same / max|y|
    cosine: float
    nonfinite: int  # values that are finite in y only
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
    """Compare two floating-point tensors on the same device, with one transfer to the host.

    `rows`: mask of the vectors along the last axis that count; all if it is None or its length does not match.
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
        max_abs=max_error,
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
    """Rows in which two integer tensors hold different values, in any order: a changed choice."""
    first, second = (tensor.reshape(-1, tensor.shape[-1]).sort(dim=-1).values for tensor in (reference, low))
    return (first != second).any(dim=-1)


FORMATS: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
}


def find_format(name: str | torch.dtype) -> torch.dtype:
    """Low-precision dtype of a name, such as "bf16", "bfloat16" or torch.bfloat16. Raises ConfigError: unknown name."""
    found = dtype_name(name)
    if found not in FORMATS:
        raise ConfigError(
            f"{found} is no low-precision format", where="number format", do=f"one of {', '.join(FORMATS)}"
        )
    return FORMATS[found]


def ulp(values: Float[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """One unit in the last place of each value in `dtype`; above its range, as if its exponents went on."""
    exponent = torch.frexp(values.abs().clamp_min(torch.finfo(dtype).smallest_normal)).exponent - 1
    return torch.ldexp(torch.full_like(values, torch.finfo(dtype).eps), exponent)


def round_to(values: Shaped[Tensor, "*shape"], dtype: torch.dtype) -> Shaped[Tensor, "*shape"]:
    """Round each value to `dtype`; the result keeps the type of `values`."""
    return values.to(dtype).to(values.dtype)


@dataclass(frozen=True)
class AxisRange:
    """max|·| of the slices along one axis."""

    axis: int  # from the end: -1 is the last
    largest: float
    largest_at: int
    smallest: float  # above 0
    smallest_at: int

    def __str__(self) -> str:
        ends = f"{self.largest:.3g} at {self.largest_at}, {self.smallest:.3g} at {self.smallest_at}"
        return f"largest and smallest max|x| along dim {self.axis}: {ends}"


@torch.no_grad()
def axis_ranges(values: Shaped[Tensor, "..."]) -> list[AxisRange]:
    """One entry for each axis longer than 1, the last axis first; non-finite values count as 0."""
    sizes, found = torch.where(values.isfinite(), values, 0), []
    for axis in long_axes(values) if values.numel() else ():
        by_slice = sizes_along(sizes, axis).double()
        above = torch.where(by_slice > 0, by_slice, torch.inf)
        facts = [by_slice.amax(), above.amin(), by_slice.argmax(), above.argmin()]
        largest, smallest, largest_at, smallest_at = torch.stack(facts).tolist()
        smallest = smallest if largest else 0.0
        found.append(AxisRange(axis, largest, int(largest_at), smallest, int(smallest_at)))
    return found


def long_axes(values: Shaped[Tensor, "..."]) -> list[int]:
    """Axes longer than 1, counted from the end, the last axis first."""
    return [axis for axis in range(-1, -values.ndim - 1, -1) if values.shape[axis] > 1]


def sizes_along(values: Shaped[Tensor, "..."], axis: int) -> Shaped[Tensor, "..."]:
    """max|·| of each slice along an axis, counted from the end."""
    others = [other for other in range(values.ndim) if other != axis % values.ndim]
    return values.abs().amax(others) if others else values.abs()
