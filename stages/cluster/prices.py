"""Prices that make experts share units evenly before any unit is placed."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

COARSEST, FINEST = 1.0, 0.05  # smoothing, in standard deviations of the affinity
ROUNDS = 10


def fit_prices(affinity_UE: Float[Tensor, "U E"], sizes_E: Int[Tensor, "E"]) -> Float[Tensor, "E"]:
    """Price each expert so that units choosing the highest affinity − price nearly fill the sizes.

    A popular expert grows dear until demand meets its size: Sinkhorn's iteration on the assignment's smoothed dual,
    with the smoothing lowered step by step.

    Args:
        affinity_UE: ``(U, E)`` how well each unit fits each expert; finite.
        sizes_E: ``(E,)`` units each expert takes; sums to U.
    Returns:
        ``(E,)`` fp32 prices, in units of affinity.
    Source: arXiv:1306.0895 (Sinkhorn), arXiv:1610.06519 section 3.2 (epsilon scaling).
    """
    prices_E = torch.zeros(affinity_UE.shape[1])
    spread = affinity_UE.std().item() if affinity_UE.numel() > 1 else 0.0
    if spread == 0.0:
        return prices_E
    wanted_E = sizes_E.clamp_min(0.5)
    for smoothing in spread * torch.logspace(0, torch.tensor(FINEST / COARSEST).log10().item(), ROUNDS):
        demand_E = ((affinity_UE - prices_E) / smoothing).softmax(1).sum(0)
        prices_E = prices_E + smoothing * (demand_E.clamp_min(1e-6) / wanted_E).log()
    return prices_E
