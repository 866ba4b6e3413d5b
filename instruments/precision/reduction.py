"""What a sum or a mean loses in a number format, axis by axis, and by the order of its additions."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from instruments.precision.comparison import measure_distance
from instruments.precision.formats import NumberFormat

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
