"""How far a low-precision tensor is from its FP32 reference."""

import math
from dataclasses import dataclass
from enum import StrEnum

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor


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


@torch.no_grad()
def measure_distance(
    reference: Shaped[Tensor, "*shape"], low: Shaped[Tensor, "*shape"], rows: Bool[Tensor, "rows"] | None = None
) -> Distance:
    """Compare two floating-point tensors, in one transfer from their device.

    Args:
        reference: of any floating-point type.
        low: of the same shape, on the same device.
        rows: which vectors of the last axis count; None or another number than there are: all.
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
    """Where the last axis of two integer tensors holds other values, whatever their order: another choice."""
    first, second = (tensor.reshape(-1, tensor.shape[-1]).sort(dim=-1).values for tensor in (reference, low))
    return (first != second).any(dim=-1)


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
