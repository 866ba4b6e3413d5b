"""What a sum or a mean loses in a number format, axis by axis, and by the order of its additions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from instruments.precision.calls import Arguments, find_tensors, map_tensors
from instruments.precision.comparison import AxisRange, NumberFormat, axis_ranges, measure_distance

# Additions one by one that are tried out; of a longer axis the first so many.
LONGEST = 16384
# Values that are tried out; of a larger tensor fewer sums.
_MOST = 2**21
WORTH_A_WORD = 0.01


@dataclass(frozen=True)
class ReductionLoss:
    """Errors are normalised L2 over all sums along the axis; infinite where one overflows."""

    format: str
    axis: int  # from the end: -1 is the last
    length: int  # summed
    size: int  # of the axis
    one_by_one: float  # every addition rounded
    pairwise: float  # in a tree, every addition rounded
    fp32: float  # added up in FP32, from the unrounded values
    mean: float  # the sum one by one, divided: overflows as it does
    stagnant: float  # share of addends below half a unit in the last place of the sum they meet
    cancellation: float  # Σ|x| / |Σx|: what any error is multiplied by

    @property
    def advice(self) -> str:
        """What to do, where a sum in the format is off by more than 1 % and FP32 is ten times better; else nothing."""
        if not self.one_by_one > WORTH_A_WORD or self.fp32 * 10 > self.one_by_one:
            return ""
        lost = f", {self.stagnant:.0%} of the addends lost" if self.stagnant > WORTH_A_WORD else ""
        tree = f"; in pairs {self.pairwise:.1g}" if self.pairwise < self.one_by_one / 2 else ""
        errors = f"error {self.one_by_one:.1g} → {self.fp32:.1g}"
        return f"sum over dim {self.axis} in fp32: {errors} ({self.format} one by one{lost}{tree})"


@torch.no_grad()
def measure_reductions(values: Float[Tensor, "..."], target: NumberFormat) -> list[ReductionLoss]:
    """One entry for each axis longer than 1, the last axis first.

    Args:
        values: finite, in float32 or float64.
        target: addends and every partial sum are rounded to it.
    """
    axes = [axis for axis in range(-1, -values.ndim - 1, -1) if values.shape[axis] > 1]
    return [_measure(values, axis, target) for axis in axes]


def _measure(values: Float[Tensor, "..."], axis: int, target: NumberFormat) -> ReductionLoss:
    size = values.shape[axis]
    length = min(size, LONGEST)
    addends_NS = values.movedim(axis, 0)[:length].reshape(length, -1)
    addends_NS = addends_NS[:, :: -(-addends_NS.numel() // _MOST)].float()
    exact_S = addends_NS.double().sum(0)
    rounded_NS = target.rounded(addends_NS)
    sums_S, stagnant = _add_one_by_one(rounded_NS, target)
    return ReductionLoss(
        format=target.name,
        axis=axis,
        length=length,
        size=size,
        one_by_one=_error(exact_S, sums_S),
        pairwise=_error(exact_S, _add_in_pairs(rounded_NS, target)),
        fp32=_error(exact_S, addends_NS.sum(0)),
        mean=_error(exact_S / length, target.rounded(sums_S / length)),
        stagnant=stagnant,
        cancellation=float(addends_NS.double().abs().sum() / exact_S.abs().sum()) if bool(exact_S.any()) else 0.0,
    )


def _error(exact_S: Float[Tensor, "S"], found_S: Float[Tensor, "S"]) -> float:
    distance = measure_distance(exact_S, found_S)
    return float("inf") if distance.nonfinite else distance.normalised_l2


def _add_one_by_one(addends_NS: Float[Tensor, "N S"], target: NumberFormat) -> tuple[Float[Tensor, "S"], float]:
    """The sums, and the share of addends (0 left out) that are too small to move the sum they meet."""
    sum_S = torch.zeros_like(addends_NS[0])
    lost_S = torch.zeros_like(sum_S)
    for addend_S in addends_NS:
        moved_S = target.rounded(sum_S + addend_S)
        lost_S += (moved_S == sum_S) & (addend_S != 0)
        sum_S = moved_S
    return sum_S, float(lost_S.sum() / (addends_NS != 0).sum().clamp_min(1))


def _add_in_pairs(addends_NS: Float[Tensor, "N S"], target: NumberFormat) -> Float[Tensor, "S"]:
    while len(addends_NS) > 1:
        half = len(addends_NS) // 2
        pairs_NS = target.rounded(addends_NS[:half] + addends_NS[half : 2 * half])
        addends_NS = torch.cat([pairs_NS, addends_NS[2 * half :]])
    return addends_NS[0]


_Run = Callable[[Arguments], Mapping[str, Tensor]]
_NONE = torch.empty(0, dtype=torch.float64)
# FP32 itself must see them: their part is above so many units in its last place.
_SEEN = 4 * torch.finfo(torch.float32).eps


def sums_up(module: nn.Module, arguments: Arguments, output: Any) -> bool:  # noqa: ANN401 - any output of a module
    """Whether it gives fewer axes than it gets, and has no weights that could be large where values are small."""
    given = [tensor.ndim for tensor in find_tensors(arguments).values() if tensor.is_floating_point()]
    made = [tensor.ndim for tensor in find_tensors(output).values() if tensor.is_floating_point()]
    return bool(given and made) and max(made) < max(given) and next(module.parameters(), None) is None


def find_swamping(arguments: Arguments, low: NumberFormat, exact: _Run, rounded: _Run) -> str:
    """In words, which slices of the inputs have no part in the low-precision output that they have in FP32.

    Args:
        arguments: of the module.
        low: slices below half of its unit in the last place of the largest slice are suspected.
        exact: the module in FP32; its outputs by path.
        rounded: the module in low precision.
    """
    for axis in _suspects(arguments, low):
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
                f"{axis.smallest:.3g} at {axis.smallest_at}: in {low.name} the sum no longer sees the small ones"
            )
    return ""


def _flat(outputs: Mapping[str, Tensor]) -> Tensor:
    return torch.cat(
        [tensor.double().flatten() for tensor in outputs.values() if tensor.is_floating_point()] or [_NONE]
    )


def _suspects(arguments: Arguments, low: NumberFormat) -> list[AxisRange]:
    inputs = [tensor for tensor in find_tensors(arguments).values() if tensor.is_floating_point()]
    return [axis for tensor in inputs for axis in axis_ranges(tensor) if axis.ratio > 2 / low.epsilon]


def _drop_small(tensor: Tensor, axis: AxisRange, low: NumberFormat) -> Tensor:
    """Zeros for the slices whose values are below half a unit in the last place of the largest."""
    if not tensor.is_floating_point() or tensor.ndim < -axis.axis or tensor.shape[axis.axis] != axis.size:
        return tensor
    others = [other for other in range(tensor.ndim) if other != axis.axis % tensor.ndim]
    sizes = tensor.abs().amax(others, keepdim=True) if others else tensor.abs()
    return torch.where(sizes < axis.largest * low.epsilon / 2, torch.zeros_like(tensor), tensor)
