"""When an error is worth a word: measured against what the model itself makes of one unit in the last place."""

import math
from enum import StrEnum


class Verdict(StrEnum):
    """From harmless to harmful."""

    OK = "ok"
    WARNING = "warning"
    SEVERE = "severe"

    @property
    def rank(self) -> int:
        """0, 1, 2."""
        return [*Verdict].index(self)


# Normalised L2, where there is nothing to measure it against.
WARNING_L2, SEVERE_L2 = 0.01, 0.10
# Times the floor. Rounding every tensor to the nearest gives 0.29 = 1/sqrt(12) of it, and 48 roundings in one module 2.
WARNING_RATIO, SEVERE_RATIO = 2.0, 10.0


def judge(normalised_l2: float, floor: float | None, nonfinite: int = 0) -> Verdict:
    """The verdict on one output.

    Args:
        normalised_l2: ‖y − ŷ‖ / ‖y‖ in low precision.
        floor: the same of an FP32 run in which every tensor is off by one unit in the last place of that precision;
            None or not finite where there is none: the plain thresholds then stand alone.
        nonfinite: values that are finite in FP32 alone.
    """
    warning, severe = limits(floor)
    if nonfinite or not normalised_l2 <= severe:
        return Verdict.SEVERE
    return Verdict.WARNING if normalised_l2 > warning else Verdict.OK


def limits(floor: float | None) -> tuple[float, float]:
    """Normalised L2 above which an output gets a warning, and above which it is severe; the latter never below 1 %."""
    if floor is None or not math.isfinite(floor) or not floor:
        return WARNING_L2, SEVERE_L2
    return WARNING_RATIO * floor, max(WARNING_L2, SEVERE_RATIO * floor)


def worst(*verdicts: Verdict) -> Verdict:
    """The one of highest rank; of none, ok."""
    return max(verdicts, key=lambda verdict: verdict.rank, default=Verdict.OK)
