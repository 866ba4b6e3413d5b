"""Plain measures of a unit, to hold S_p against."""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor


def score_taylor(sum_taylor_LF: Float[Tensor, "L F"], tokens: int) -> Float[Tensor, "L F"]:
    """First-order loss change when a unit is removed, mean |h·∂loss/∂h| per token.

    Source: arXiv:1611.06440 eq. 5, absolute value inside the mean.
    """
    return (sum_taylor_LF / tokens).float()


def score_wanda(
    sum_sq_LF: Float[Tensor, "L F"], down_norm_LF: Float[Tensor, "L F"], tokens: int
) -> Float[Tensor, "L F"]:
    """‖d_j‖·rms(h_j): weight times the size of its input.

    Source: arXiv:2306.11695 eq. 1; differs: one figure for the whole column d_j instead of one per weight.
    """
    return ((sum_sq_LF / tokens).sqrt() * down_norm_LF).float()


def score_contribution(
    sum_abs_LF: Float[Tensor, "L F"], down_norm_LF: Float[Tensor, "L F"], tokens: int
) -> Float[Tensor, "L F"]:
    """Mean |h_j|·‖d_j‖: how long a vector the unit adds to the residual stream."""
    return (sum_abs_LF / tokens * down_norm_LF).float()


def score_frequency(active_count_LF: Int[Tensor, "L F"], tokens: int) -> Float[Tensor, "L F"]:
    """Share of tokens where the unit is among the most active."""
    return (active_count_LF / tokens).float()


def score_random(layers: int, width: int, seed: int) -> Float[Tensor, "L F"]:
    """Seeded noise in 0..1; every layer has its own stream, so that no layer's draw depends on another's."""
    rows = [np.random.default_rng((seed, layer)).random(width, dtype=np.float32) for layer in range(layers)]
    return torch.from_numpy(np.stack(rows))
