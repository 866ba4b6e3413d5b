"""Assign neurons to experts of given sizes with the highest total affinity."""

import numpy as np
import ot
import torch
from jaxtyping import Float, Int
from torch import Tensor

MAX_PIVOTS = 10**9  # of the network simplex: far more than it ever takes


def assign_balanced(affinity_UE: Float[Tensor, "U E"], sizes_E: Int[Tensor, "E"]) -> Int[Tensor, "U"]:
    """Give every neuron an expert so that expert e gets exactly `sizes_E[e]` and the summed affinity is the highest.

    A transport problem of U unit masses to E sizes. At U = 18,944 and E = 128 it takes 1 to 2 s and 0.1 GB; the usual
    solver of the U × U assignment problem would need 2.9 GB.

    Args:
        affinity_UE: ``(U, E)`` how well each neuron fits each expert; finite.
        sizes_E: ``(E,)`` neurons each expert takes; sums to U.
    Returns:
        ``(U,)`` int64 expert of each neuron.
    Numerics: the exact optimum in fp64; among equal ones always the same.
    Source: the network simplex of POT (Bonneel et al. 2011).
    """
    cost_UE = affinity_UE.max().double() - affinity_UE.double()
    cost_UE /= cost_UE.max().clamp_min(torch.finfo(torch.float64).tiny)  # its tolerances are absolute
    plan_UE = ot.emd(np.ones(len(cost_UE)), sizes_E.double().numpy(), cost_UE.numpy(), numItermax=MAX_PIVOTS)
    return torch.from_numpy(plan_UE.argmax(1))
