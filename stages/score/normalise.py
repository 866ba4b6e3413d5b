"""Make measures of different scale comparable within a layer."""

from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

Normalisation = Literal["zscore", "rank", "minmax"]


def normalise(values_LF: Shaped[Tensor, "L F"], method: Normalisation) -> Float[Tensor, "L F"]:
    """Rescale every layer by its own figures.

    Args:
        values_LF: ``(L, F)`` finite measure of each unit.
        method: zscore (mean 0, standard deviation 1), rank (0 lowest to 1 highest, ties share the mean of their
            ranks) or minmax (0 lowest to 1 highest).
    Returns:
        ``(L, F)`` fp64; 0 throughout a layer without spread.
    """
    values_LF = values_LF.double()
    match method:
        case "zscore":
            scaled_LF = (values_LF - values_LF.mean(1, keepdim=True)) / values_LF.std(1, correction=0, keepdim=True)
        case "rank":
            scaled_LF = torch.stack([_ranks(values_F) for values_F in values_LF]) / (values_LF.shape[1] - 1)
        case "minmax":
            low_L1, high_L1 = values_LF.aminmax(dim=1, keepdim=True)
            scaled_LF = (values_LF - low_L1) / (high_L1 - low_L1)
    return torch.where(has_spread(values_LF), scaled_LF, 0.0)


def has_spread(values_LF: Shaped[Tensor, "L F"]) -> Shaped[Tensor, "L 1"]:
    """Whether a layer's units differ by more than rounding."""
    low_L1, high_L1 = values_LF.aminmax(dim=1, keepdim=True)
    return high_L1 - low_L1 > 1e-12 * torch.maximum(low_L1.abs(), high_L1.abs())


def _ranks(values_F: Float[Tensor, "F"]) -> Float[Tensor, "F"]:
    """0 for the lowest; ties share the mean of their ranks."""
    _values, group_F, size_G = np.unique(values_F.numpy(), return_inverse=True, return_counts=True)
    return torch.from_numpy((size_G.cumsum() - (size_G + 1) / 2)[group_F])
