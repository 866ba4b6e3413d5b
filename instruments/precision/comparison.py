"""Number formats, the distance of a tensor from its low-precision version, and sums that lose small values."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from instruments.dtypes import dtype_name
from instruments.errors import ConfigError
from instruments.shapes import Bool, Float, Shaped
from instruments.tensors import Arguments, find_tensors, map_tensors


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
    size: int
    largest: float
    largest_at: int
    smallest: float  # above 0
    smallest_at: int

    @property
    def ratio(self) -> float:
        """Largest over smallest; 1 where there is no value above 0."""
        return self.largest / self.smallest if self.smallest else 1.0

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
        found.append(AxisRange(axis, len(by_slice), largest, int(largest_at), smallest, int(smallest_at)))
    return found


def long_axes(values: Shaped[Tensor, "..."]) -> list[int]:
    """Axes longer than 1, counted from the end, the last axis first."""
    return [axis for axis in range(-1, -values.ndim - 1, -1) if values.shape[axis] > 1]


def sizes_along(values: Shaped[Tensor, "..."], axis: int, *, keepdim: bool = False) -> Shaped[Tensor, "..."]:
    """max|·| of each slice along an axis, counted from the end."""
    others = [other for other in range(values.ndim) if other != axis % values.ndim]
    return values.abs().amax(others, keepdim=keepdim) if others else values.abs()


_Run = Callable[[Arguments], Mapping[str, Tensor]]
# Least share of the small slices in the FP32 output: below it FP32 loses them as well.
_SEEN = 4 * torch.finfo(torch.float32).eps


def sums_up(module: nn.Module, arguments: Arguments, output: Any) -> bool:  # noqa: ANN401 - any output of a module
    """Whether the output has fewer axes than the input; no module with weights, as these could offset small values."""
    given = [tensor.ndim for tensor in find_tensors(arguments).values() if tensor.is_floating_point()]
    made = [tensor.ndim for tensor in find_tensors(output).values() if tensor.is_floating_point()]
    return bool(given and made) and max(made) < max(given) and next(module.parameters(), None) is None


def find_swamping(arguments: Arguments, low: torch.dtype, exact: _Run, rounded: _Run) -> str:
    """Describe the input slices that change the FP32 output and are lost in the low-precision output; "" if none.

    Candidates are slices below half a unit in the last place of the largest one. `exact` runs the module in FP32,
    `rounded` in low precision.
    """
    inputs = [tensor for tensor in find_tensors(arguments).values() if tensor.is_floating_point()]
    ranges = [axis for tensor in inputs for axis in axis_ranges(tensor)]
    for axis in [axis for axis in ranges if axis.ratio > 2 / torch.finfo(low).eps]:
        without = map_tensors(partial(_drop_small, axis=axis, low=low), arguments)
        whole, rest = _flat(exact(arguments)), _flat(exact(without))
        low_whole, low_rest = _flat(rounded(arguments)), _flat(rounded(without))
        if not whole.shape == rest.shape == low_whole.shape == low_rest.shape:
            continue
        part = whole - rest
        seen = float(part.norm()) > _SEEN * float(whole.norm())
        if seen and float((low_whole - low_rest - part).norm()) > 0.5 * float(part.norm()):
            return (
                f"dim {axis.axis} of its input holds {axis.largest:.3g} at {axis.largest_at} and no more than "
                f"{axis.smallest:.3g} at {axis.smallest_at}: in {dtype_name(low)} the sum no longer sees the small ones"
            )
    return ""


def _flat(outputs: Mapping[str, Tensor]) -> Tensor:
    parts = [tensor.double().flatten() for tensor in outputs.values() if tensor.is_floating_point()]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64)


def _drop_small(tensor: Tensor, axis: AxisRange, low: torch.dtype) -> Tensor:
    """Set slices to zero whose values are below half a unit in the last place of the largest."""
    if not tensor.is_floating_point() or tensor.ndim < -axis.axis or tensor.shape[axis.axis] != axis.size:
        return tensor
    sizes = sizes_along(tensor, axis.axis, keepdim=True)
    return torch.where(sizes < axis.largest * torch.finfo(low).eps / 2, torch.zeros_like(tensor), tensor)
