"""From the distance between two tensors to a verdict."""

import math
from dataclasses import dataclass, field
from enum import StrEnum


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


class Verdict(StrEnum):
    """From harmless to harmful."""

    OK = "ok"
    WARNING = "warning"
    SEVERE = "severe"


def worst(*verdicts: Verdict) -> Verdict:
    """The most harmful; of none, ok."""
    return max(verdicts, key=[*Verdict].index, default=Verdict.OK)


@dataclass
class DiffLimits:
    """What errors are held to; errors are normalised L2."""

    # Times the error floor: what the model makes of one unit in the last place. Rounding every tensor to the nearest
    # gives 0.29 = 1/sqrt(12) of it, and 48 roundings in one module 2.
    warning_ratio: float = field(default=2.0, metadata={"above": 0})
    severe_ratio: float = field(default=10.0, metadata={"above": 0})
    # Absolute limits for the error of the model's own output; also of other outputs that have no floor.
    output_warning: float = field(default=0.01, metadata={"above": 0})
    output_severe: float = field(default=0.10, metadata={"above": 0})

    def judge(self, distance: Distance, floor: float | None) -> Verdict:
        """The verdict on one output. Values that are finite in FP32 alone are severe; errors below 1 % never are.

        `floor` is the normalised L2 of an FP32 run in which every tensor is off by one unit in the last place of that
        precision; None or not finite where there is none: the absolute limits then count.
        """
        warning, severe = self.output_warning, self.output_severe
        if floor and math.isfinite(floor):
            warning, severe = self.warning_ratio * floor, max(self.output_warning, self.severe_ratio * floor)
        if distance.nonfinite or not distance.normalised_l2 <= severe:
            return Verdict.SEVERE
        return Verdict.WARNING if distance.normalised_l2 > warning else Verdict.OK
