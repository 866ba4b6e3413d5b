"""Distance of a tensor from another one: from its low-precision version, or from the same tensor of another run."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor


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
