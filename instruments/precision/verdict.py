"""Verdicts on the distance between two tensors."""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from instruments.precision.comparison import Distance


class Verdict(StrEnum):
    """In ascending order of severity."""

    OK = "ok"
    WARNING = "warning"
    SEVERE = "severe"


def worst(*verdicts: Verdict) -> Verdict:
    """The most severe verdict; ok if there is none."""
    return max(verdicts, key=[*Verdict].index, default=Verdict.OK)


@dataclass
class DiffLimits:
    """Limits on errors, which are normalised L2."""

    # Multiples of the error floor, the model's response to one unit in the last place. Rounding every tensor to the
    # nearest gives 0.29 = 1/sqrt(12) of the floor; 48 roundings in one module give 2.
    warning_ratio: float = field(default=2.0, metadata={"above": 0})
    severe_ratio: float = field(default=10.0, metadata={"above": 0})
    # Absolute limits on the error of the model's own output, and of other outputs that have no floor.
    output_warning: float = field(default=0.01, metadata={"above": 0})
    output_severe: float = field(default=0.10, metadata={"above": 0})

    def judge(self, distance: "Distance", floor: float | None) -> Verdict:
        """Judge one output. Values that are finite in FP32 only are severe; errors below `output_warning` never are.

        `floor`: normalised L2 of an FP32 run in which every tensor is off by one unit in the last place of the low
        precision; if it is None, 0 or not finite, the absolute limits apply.
        """
        warning, severe = self.output_warning, self.output_severe
        if floor and math.isfinite(floor):
            warning, severe = self.warning_ratio * floor, max(self.output_warning, self.severe_ratio * floor)
        if distance.nonfinite or not distance.normalised_l2 <= severe:
            return Verdict.SEVERE
        return Verdict.WARNING if distance.normalised_l2 > warning else Verdict.OK
