"""Assign units to experts of given sizes with the highest total affinity."""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from stages.cluster.prices import fit_prices

STEPS = 2**30  # integer steps across the range of affinities
FAR = 2**60
MISPLACED_SHARE = 0.02  # of the units; fitted prices leave about as many out of place

Integers = NDArray[np.int64]


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
    market = _Market(cost_UE, _in_steps(prices_E, scale))
    surplus_E = np.bincount(market.labels_U, minlength=len(sizes_E)) - sizes_E.numpy()
    while (surplus_E > 0).any():
        chain = market.find_chain(int(surplus_E.argmax()), surplus_E < 0)
        moved = market.shift(chain, at_most=int(min(surplus_E[chain[0]], -surplus_E[chain[-1]])))
        surplus_E[chain[0]] -= moved
        surplus_E[chain[-1]] += moved
    return Assignment(torch.from_numpy(market.labels_U), torch.from_numpy(market.prices_E) / scale)


def _misplaced(affinity_UE: Tensor, sizes_E: Tensor, prices_E: Tensor) -> int:
    """How many units have to move after all have chosen by affinity − price."""
    demand_E = (affinity_UE - prices_E.to(affinity_UE)).argmax(1).bincount(minlength=len(sizes_E))
    return int((demand_E - sizes_E).clamp_min(0).sum())


def _in_steps(values: Tensor, scale: float) -> Integers:
    steps: Integers = (values.double() * scale).round().long().numpy()
    return steps


@dataclass
class _Market:
    """Units with their experts, and prices at which no unit would rather be elsewhere.

    `extra_EE[e, f]` is the cost of the cheapest move of a unit from e to f. Prices keep
    `extra_EE[e, f] + prices_E[f] − prices_E[e]` at or above 0 for all pairs, which proves the labels to be the cheapest
    for the sizes they have.
    """

    cost_UE: Integers
    prices_E: Integers

    def __post_init__(self) -> None:
        self.labels_U: Integers = (self.cost_UE + self.prices_E).argmin(1)
        experts = len(self.prices_E)
        self.extra_EE = np.full((experts, experts), FAR)
        for expert in range(experts):
            self._refresh(expert)

    def _refresh(self, source: int) -> None:
        """Recompute what it costs to move a unit out of `source`."""
        members_M = np.flatnonzero(self.labels_U == source)
        extra_ME = self.cost_UE[members_M] - self.cost_UE[members_M, source, None]
        self.extra_EE[source] = extra_ME.min(0, initial=FAR)

    def find_chain(self, source: int, wanting_E: NDArray[np.bool_]) -> list[int]:
        """Experts along the cheapest chain of moves from `source` to one that wants units (Dijkstra).

        Raises the prices of the experts it passed so far that the chain costs nothing at the new prices.
        """
        distance_E = np.full(len(self.prices_E), FAR)
        distance_E[source] = 0
        previous_E = np.full(len(self.prices_E), source)
        open_E = np.ones(len(self.prices_E), dtype=bool)
        while not wanting_E[nearest := int(np.where(open_E, distance_E, 2 * FAR).argmin())]:
            open_E[nearest] = False
            through_E = distance_E[nearest] + self.extra_EE[nearest] + self.prices_E - self.prices_E[nearest]
            shorter_E = open_E & (through_E < distance_E)
            distance_E[shorter_E], previous_E[shorter_E] = through_E[shorter_E], nearest
        self.prices_E += np.where(open_E, 0, distance_E[nearest] - distance_E)
        chain = [nearest]
        while chain[-1] != source:
            chain.append(int(previous_E[chain[-1]]))
        return chain[::-1]

    def shift(self, chain: list[int], *, at_most: int) -> int:
        """Move as many units as cost the same along every link of the chain; returns how many."""
        links = list(pairwise(chain))
        cheapest = [self._cheapest_units(source, target) for source, target in links]
        moved = min(at_most, *map(len, cheapest))
        for (_, target), units in zip(links, cheapest, strict=True):
            self.labels_U[units[:moved]] = target
        for expert in chain:
            self._refresh(expert)
        return moved

    def _cheapest_units(self, source: int, target: int) -> Integers:
        """Every unit of `source` whose move to `target` costs the least."""
        members_M = np.flatnonzero(self.labels_U == source)
        extra_M = self.cost_UE[members_M, target] - self.cost_UE[members_M, source]
        cheapest: Integers = members_M[extra_M == self.extra_EE[source, target]]
        return cheapest
