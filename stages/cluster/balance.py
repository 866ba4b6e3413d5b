"""Assign units to experts of given sizes with the highest total affinity."""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from stages.cluster.market import Integers, trade
from stages.cluster.prices import fit_prices

STEPS = 2**30  # integer steps across the range of affinities
MISPLACED_SHARE = 0.02  # of the units; fitted prices leave about as many out of place


class Assignment(NamedTuple):
    """The expert of every unit, and prices that prove it the best: no unit would rather be elsewhere."""

    labels_U: Int[Tensor, "U"]
    prices_E: Float[Tensor, "E"]  # float64, in units of affinity


def assign_balanced(
    affinity_UE: Float[Tensor, "U E"], sizes_E: Int[Tensor, "E"], *, prices_E: Float[Tensor, "E"] | None = None
) -> Assignment:
    """Give every unit an expert so that expert e gets exactly `sizes_E[e]` and the summed affinity is the highest.

    Units first choose by affinity − price. Experts that got too many then pass units on along the cheapest chain of
    moves to one that got too few. Chains run between the E experts, not the U units, which is what makes this fast:
    an O(U³) assignment problem becomes a few shortest paths on E nodes.

    Args:
        affinity_UE: ``(U, E)`` how well each unit fits each expert; finite.
        sizes_E: ``(E,)`` units each expert takes; sums to U.
        prices_E: ``(E,)`` those of a like problem, where prices start if they serve better than fitted ones would; they
            change the time taken, not the total.
    Returns:
        Experts and prices.
    Numerics: the exact optimum of affinities rounded to 2⁻³⁰ of their range; in integers, so nothing drifts.
    Source: successive shortest paths with potentials (Ahuja, Magnanti, Orlin, Network Flows, 1993, section 9.7).
    """
    low, high = affinity_UE.min(), affinity_UE.max()
    scale = STEPS / max((high - low).item(), torch.finfo(torch.float32).tiny)
    cost_UE = _in_steps(high - affinity_UE, scale)
    if prices_E is None or _misplaced(affinity_UE, sizes_E, prices_E) > MISPLACED_SHARE * len(affinity_UE):
        prices_E = fit_prices(affinity_UE, sizes_E)
    steps_E = _in_steps(prices_E, scale)
    labels_U = (cost_UE + steps_E).argmin(1)
    trade(cost_UE, steps_E, labels_U, np.bincount(labels_U, minlength=len(sizes_E)) - sizes_E.numpy())
    return Assignment(torch.from_numpy(labels_U), torch.from_numpy(steps_E) / scale)


def _misplaced(affinity_UE: Tensor, sizes_E: Tensor, prices_E: Tensor) -> int:
    """How many units have to move after all have chosen by affinity − price."""
    demand_E = (affinity_UE - prices_E.to(affinity_UE)).argmax(1).bincount(minlength=len(sizes_E))
    return int((demand_E - sizes_E).clamp_min(0).sum())


def _in_steps(values: Tensor, scale: float) -> Integers:
    steps: Integers = (values.double() * scale).round().long().numpy()
    return steps
