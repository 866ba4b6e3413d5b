"""Number formats of low precision: what they reach, where they round, and how far apart values lie."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from instruments.errors import ConfigError


@dataclass(frozen=True)
class NumberFormat:
    """A binary floating-point format of torch."""

    name: str
    dtype: torch.dtype

    @property
    def largest(self) -> float:
        """The largest finite value."""
        return torch.finfo(self.dtype).max

    @property
    def epsilon(self) -> float:
        """From 1 to the next value: one unit in the last place of 1."""
        return torch.finfo(self.dtype).eps

    @property
    def smallest_normal(self) -> float:
        """Below it values lose digits (underflow) ..."""
        return torch.finfo(self.dtype).smallest_normal

    @property
    def smallest(self) -> float:
        """... down to this one; below half of it they become 0 (flush to zero)."""
        return self.smallest_normal * self.epsilon

    def ulp(self, values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """One unit in the last place of each value; of what the format cannot reach, as if it went on."""
        exponent = torch.frexp(values.abs().clamp_min(self.smallest_normal)).exponent - 1
        return torch.ldexp(torch.full_like(values, self.epsilon), exponent)

    def rounded(self, values: Shaped[Tensor, "*shape"]) -> Shaped[Tensor, "*shape"]:
        """Each value as the format holds it, in the number format it came in."""
        return values.to(self.dtype).to(values.dtype)


# fp8 where torch has it.
FORMATS = {
    name: NumberFormat(name, getattr(torch, name))
    for name in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
    if hasattr(torch, name)
}


def find_format(name: str | torch.dtype, setting: str = "precision") -> NumberFormat:
    """The format of that name, as in "bfloat16" or torch.bfloat16. Raises ConfigError: there is none."""
    name = str(name).removeprefix("torch.")
    if name not in FORMATS:
        raise ConfigError(
            f"{setting}={name} is no low-precision format of this torch",
            where=f"argument {setting}",
            do=f"{setting}= one of {', '.join(FORMATS)}",
        )
    return FORMATS[name]


def decibels(relative: float) -> float:
    """−20·log10 of a relative error."""
    return math.inf if not relative else -20 * math.log10(relative)


# Beyond it, large numbers may swallow small ones where the two are added up.
WIDE = 1e4


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
        """Whether the ratio is beyond 1e4."""
        return self.ratio > WIDE


@torch.no_grad()
def axis_ranges(values: Shaped[Tensor, "..."]) -> list[AxisRange]:
    """One entry for each axis longer than 1, the last axis first; values that are not finite count as 0."""
    if not values.numel():
        return []
    sizes = torch.where(values.isfinite(), values, 0).abs()
    axes = [axis for axis in range(-1, -values.ndim - 1, -1) if values.shape[axis] > 1]
    return [_axis_range(sizes, axis) for axis in axes]


def _axis_range(sizes: Shaped[Tensor, "..."], axis: int) -> AxisRange:
    others = [other for other in range(sizes.ndim) if other != axis % sizes.ndim]
    by_slice = (sizes.amax(others) if others else sizes).double()
    above = torch.where(by_slice > 0, by_slice, torch.inf)
    found = torch.stack([by_slice.amax(), above.amin(), (by_slice == 0).sum(), by_slice.argmax(), above.argmin()])
    largest, smallest, zero, largest_at, smallest_at = found.tolist()
    smallest = smallest if largest else 0.0
    return AxisRange(axis, len(by_slice), largest, int(largest_at), smallest, int(smallest_at), int(zero))
