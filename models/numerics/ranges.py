"""How far apart the slices of a tensor lie in size, axis by axis."""

from dataclasses import dataclass

import torch
from jaxtyping import Shaped
from torch import Tensor

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
