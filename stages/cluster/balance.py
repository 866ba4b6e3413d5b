"""Assign neurons to experts of given sizes with the highest total affinity."""

from inspect import unwrap
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

Integers = NDArray[np.int64]

FAR = np.int64(2**60)


def trade(cost_UE: Integers, prices_E: Integers, labels_U: Integers, excess_E: Integers) -> None:
    """Pass neurons on along cheapest chains of moves until no expert has too many; changes all but the costs.

    `extra_EE[e, f]` is the cost of the cheapest move of a neuron from e to f. Prices keep
    `extra_EE[e, f] + prices_E[f] − prices_E[e]` at or above 0 for all pairs, which proves the labels to be the cheapest
    for the sizes they have.

    Args:
        cost_UE: ``(U, E)`` of every neuron in every expert.
        prices_E: ``(E,)`` what an expert costs beside.
        labels_U: ``(U,)`` where cost and price together are lowest.
        excess_E: ``(E,)`` neurons an expert has too many; sums to 0.
    """
    experts = len(prices_E)
    extra_EE = np.full((experts, experts), FAR)
    for expert in range(experts):
        _refresh(extra_EE, cost_UE, labels_U, expert)
    while excess_E.max() > 0:
        source = int(excess_E.argmax())
        target, previous_E = _find_chain(source, extra_EE, prices_E, excess_E)
        moved = min(excess_E[source], -excess_E[target])
        expert = target
        while expert != source:
            moved = min(moved, _shift(extra_EE, cost_UE, labels_U, previous_E[expert], expert, 0))
            expert = previous_E[expert]
        excess_E[source] -= moved
        excess_E[target] += moved
        while target != source:  # from the last link to the first, so that no neuron moves twice
            _shift(extra_EE, cost_UE, labels_U, previous_E[target], target, moved)
            _refresh(extra_EE, cost_UE, labels_U, target)
            target = previous_E[target]
        _refresh(extra_EE, cost_UE, labels_U, source)


def _refresh(extra_EE: Integers, cost_UE: Integers, labels_U: Integers, source: int) -> None:
    """Recompute what it costs to move a neuron out of `source`."""
    extra_E = extra_EE[source]
    extra_E[:] = FAR
    for neuron in range(len(labels_U)):
        if labels_U[neuron] == source:
            for expert in range(len(extra_E)):
                extra_E[expert] = min(extra_E[expert], cost_UE[neuron, expert] - cost_UE[neuron, source])


def _find_chain(source: int, extra_EE: Integers, prices_E: Integers, excess_E: Integers) -> tuple[int, Integers]:
    """The cheapest chain of moves from `source` to an expert that lacks neurons (Dijkstra): its end and links back.

    Raises the prices of the experts it passed so far that the chain costs nothing at the new prices.
    """
    experts = len(prices_E)
    distance_E, previous_E = np.full(experts, FAR), np.full(experts, source)
    distance_E[source] = 0
    is_open_E = np.full(experts, True)
    while True:
        nearest = -1
        for expert in range(experts):
            if is_open_E[expert] and (nearest < 0 or distance_E[expert] < distance_E[nearest]):
                nearest = expert
        if excess_E[nearest] < 0:
            break
        is_open_E[nearest] = False
        for expert in range(experts):
            through = distance_E[nearest] + extra_EE[nearest, expert] + prices_E[expert] - prices_E[nearest]
            if is_open_E[expert] and through < distance_E[expert]:
                distance_E[expert], previous_E[expert] = through, nearest
    for expert in range(experts):
        if not is_open_E[expert]:
            prices_E[expert] += distance_E[nearest] - distance_E[expert]
    return nearest, previous_E


def _shift(extra_EE: Integers, cost_UE: Integers, labels_U: Integers, source: int, target: int, at_most: int) -> int:
    """Move neurons whose move from `source` to `target` costs the least; returns how many of them there were."""
    found = 0
    for neuron in range(len(labels_U)):
        if labels_U[neuron] == source and cost_UE[neuron, target] - cost_UE[neuron, source] == extra_EE[source, target]:
            if found < at_most:
                labels_U[neuron] = target
            found += 1
    return found


# What tests wrap for type checks is unwrapped.
_compiled = njit(cache=True)
_refresh = _compiled(unwrap(_refresh))
_find_chain = _compiled(unwrap(_find_chain))
_shift = _compiled(unwrap(_shift))
trade = _compiled(unwrap(trade))


COARSEST, FINEST = 1.0, 0.05  # smoothing, in standard deviations of the affinity
ROUNDS = 10


def fit_prices(affinity_UE: Float[Tensor, "U E"], sizes_E: Int[Tensor, "E"]) -> Float[Tensor, "E"]:
    """Price each expert so that neurons choosing the highest affinity − price nearly fill the sizes.

    A popular expert grows dear until demand meets its size: Sinkhorn's iteration on the assignment's smoothed dual,
    with the smoothing lowered step by step.

    Args:
        affinity_UE: ``(U, E)`` how well each neuron fits each expert; finite.
        sizes_E: ``(E,)`` neurons each expert takes; sums to U.
    Returns:
        ``(E,)`` fp32 prices, in units of affinity.
    Source: arXiv:1306.0895 (Sinkhorn), arXiv:1610.06519 section 3.2 (epsilon scaling).
    """
    prices_E = torch.zeros(affinity_UE.shape[1])
    logit_std = affinity_UE.std().item() if affinity_UE.numel() > 1 else 0.0
    if logit_std == 0.0:
        return prices_E
    wanted_E = sizes_E.clamp_min(0.5)
    for smoothing in logit_std * torch.logspace(0, torch.tensor(FINEST / COARSEST).log10().item(), ROUNDS):
        demand_E = ((affinity_UE - prices_E) / smoothing).softmax(1).sum(0)
        prices_E = prices_E + smoothing * (demand_E.clamp_min(1e-6) / wanted_E).log()
    return prices_E


STEPS = 2**30  # integer steps across the range of affinities
MISPLACED_SHARE = 0.02  # of the neurons; fitted prices leave about as many out of place


class Assignment(NamedTuple):
    """The expert of every neuron, and prices that prove it the best: no neuron would rather be elsewhere."""

    labels_U: Int[Tensor, "U"]
    prices_E: Float[Tensor, "E"]  # float64, in units of affinity


def assign_balanced(
    affinity_UE: Float[Tensor, "U E"], sizes_E: Int[Tensor, "E"], *, prices_E: Float[Tensor, "E"] | None = None
) -> Assignment:
    """Give every neuron an expert so that expert e gets exactly `sizes_E[e]` and the summed affinity is the highest.

    Neurons first choose by affinity − price. Experts that got too many then pass neurons on along the cheapest chain of
    moves to one that got too few. Chains run between the E experts, not the U neurons, which is what makes this fast:
    an O(U³) assignment problem becomes a few shortest paths on E nodes.

    Args:
        affinity_UE: ``(U, E)`` how well each neuron fits each expert; finite.
        sizes_E: ``(E,)`` neurons each expert takes; sums to U.
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
    """How many neurons have to move after all have chosen by affinity − price."""
    demand_E = (affinity_UE - prices_E.to(affinity_UE)).argmax(1).bincount(minlength=len(sizes_E))
    return int((demand_E - sizes_E).clamp_min(0).sum())


def _in_steps(values: Tensor, scale: float) -> Integers:
    steps: Integers = (values.double() * scale).round().long().numpy()
    return steps
