"""From one group per unit to experts of exactly N units each."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def group_sizes(units: int, groups: int) -> Int[Tensor, "E"]:
    """Sizes that sum to `units` and differ by one at most."""
    sizes_E = torch.full((groups,), units // groups)
    sizes_E[: units % groups] += 1
    return sizes_E


def fill_experts(affinity_UE: Float[Tensor, "U E"], labels_U: Int[Tensor, "U"], size: int) -> Int[Tensor, "E N"]:
    """Complete every group to `size` units with those that fit it best.

    Args:
        affinity_UE: ``(U, E)`` how well each unit fits each expert; finite.
        labels_U: ``(U,)`` group of each unit; no group is larger than `size`.
        size: N, at most U.
    Returns:
        ``(E, N)`` int64 units of each expert, ascending: every unit at least once, none twice in an expert; ties go to
        the lower index.
    """
    fit_EU = affinity_UE.T.clone()
    fit_EU[labels_U, torch.arange(len(labels_U))] = torch.inf
    best_EU = fit_EU.argsort(dim=1, descending=True, stable=True)
    return best_EU[:, :size].sort(dim=1).values
