"""What the values of a tensor lose in a number format, each by itself."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from models.numerics.diff.comparison import measure_distance
from models.numerics.diff.verdict import Verdict
from models.numerics.formats import NumberFormat

# Shares of the values above 0 in size.
WARNING_SHARE, SEVERE_SHARE = 0.01, 0.10


@dataclass(frozen=True)
class FormatLoss:
    """Shares count values that are finite and not 0."""

    format: str
    underflow: float  # below the smallest normal value: digits are lost
    flushed: float  # of them, what becomes 0
    overflow: int  # values beyond the largest one
    normalised_l2: float  # ‖x − x̂‖ / ‖x‖ of those that do not overflow
    max_relative: float  # max|x − x̂| / max|x| of the same
    sqnr_db: float

    @property
    def verdict(self) -> Verdict:
        """Overflow is severe; underflow from a tenth of the values on, and worth a warning from a hundredth."""
        if self.overflow or self.underflow > SEVERE_SHARE:
            return Verdict.SEVERE
        return Verdict.WARNING if self.underflow > WARNING_SHARE else Verdict.OK


@torch.no_grad()
def measure_loss(values: Float[Tensor, "size"], target: NumberFormat) -> FormatLoss:
    """Round finite values to a format, and count.

    Args:
        values: finite, in float32 or float64.
        target: rounding is to the nearest; values that round beyond the largest one overflow.
    """
    sizes = values.abs()
    known = max(1, int((sizes > 0).sum()))
    rounded = target.rounded(values)
    over = (sizes >= target.largest * (1 + target.epsilon / 4)) | ~rounded.isfinite()
    kept = torch.where(over, 0, values)
    distance = measure_distance(kept, torch.where(over, 0, rounded))
    return FormatLoss(
        format=target.name,
        underflow=int(((sizes > 0) & (sizes < target.smallest_normal)).sum()) / known,
        flushed=int(((sizes > 0) & (rounded == 0)).sum()) / known,
        overflow=int(over.sum()),
        normalised_l2=distance.normalised_l2,
        max_relative=distance.max_relative,
        sqnr_db=distance.sqnr_db,
    )
