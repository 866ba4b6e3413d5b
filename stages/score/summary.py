"""Figures that tell whether a score says anything."""

from jaxtyping import Float
from torch import Tensor

from stages.score.normalise import has_spread, normalise


def rank_correlation(first_LF: Float[Tensor, "L F"], second_LF: Float[Tensor, "L F"]) -> list[float | None]:
    """Spearman's rank correlation of two measures in every layer; None where one of them has no spread."""
    ranks = (normalise(normalise(values_LF, "rank"), "zscore") for values_LF in (first_LF, second_LF))
    correlation_L = (next(ranks) * next(ranks)).mean(1)
    defined_L1 = has_spread(first_LF) & has_spread(second_LF)
    return [value if ok else None for value, ok in zip(correlation_L.tolist(), defined_L1[:, 0].tolist(), strict=True)]
