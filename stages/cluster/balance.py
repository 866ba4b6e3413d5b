"""Assign units to experts of given sizes with the highest total affinity."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from stages.cluster.prices import fit_prices

STEPS = 2**30  # integer steps across the range of affinities: optimality is exact, rounding below 1e-9 of the range
FAR = 2**60

Integers = NDArray[np.int64]


def assign_balanced(affinity_UE: Float[Tensor, "U E"], sizes_E: Int[Tensor, "E"]) -> Int[Tensor, "U"]:
    """Give every unit an expert so that expert e gets exactly `sizes_E[e]` and the summed affinity is the highest.

    Units first choose by affinity − price. Experts that got too many then pass units on along the cheapest chain of
    moves to one that got too few. Chains run between the E experts, not the U units, which is what makes this fast:
    an O(U³) assignment problem becomes a few shortest paths on E nodes.

    Args:
        affinity_UE: ``(U, E)`` how well each unit fits each expert; finite.
        sizes_E: ``(E,)`` units each expert takes; sums to U.
    Returns:
        ``(U,)`` int64 expert of each unit.
    Numerics: exact optimum of the affinities rounded to 2⁻³⁰ of their range; integers, so the same on every machine
        for the same affinities.
    Source: successive shortest paths (Ahuja, Magnanti, Orlin, Network Flows, section 9.7), started from dual prices.
    """
    low, high = affinity_UE.min(), affinity_UE.max()
    scale = STEPS / max((high - low).item(), torch.finfo(torch.float32).tiny)
    cost_UE = ((high - affinity_UE).double() * scale).round().long().numpy()
    prices_E = (fit_prices(affinity_UE, sizes_E).double() * scale).round().long().numpy()
    moves = _Moves(cost_UE, (cost_UE + prices_E).argmin(1))
    surplus_E = np.bincount(moves.labels_U, minlength=len(prices_E)) - sizes_E.numpy()
    while (surplus_E > 0).any():
        chain = moves.cheapest_chain(surplus_E)
        moved = moves.shift(chain, at_most=min(surplus_E[chain[0]], -surplus_E[chain[-1]]))
        surplus_E[chain[0]] -= moved
        surplus_E[chain[-1]] += moved
    return torch.from_numpy(moves.labels_U)


@dataclass
class _Moves:
    """For every pair of experts, what the cheapest move of a unit from the one to the other costs."""

    cost_UE: Integers
    labels_U: Integers

    def __post_init__(self) -> None:
        experts = self.cost_UE.shape[1]
        self.price_EE = np.full((experts, experts), FAR)
        for expert in range(experts):
            self._refresh(expert)

    def _refresh(self, source: int) -> None:
        """Recompute what it costs to move a unit out of `source`."""
        members_M = np.flatnonzero(self.labels_U == source)
        extra_ME = self.cost_UE[members_M] - self.cost_UE[members_M, source, None]
        self.price_EE[source] = extra_ME.min(0, initial=FAR)
        self.price_EE[source, source] = FAR

    def cheapest_chain(self, surplus_E: Integers) -> list[int]:
        """Experts along the cheapest chain of moves from one with too many units to one with too few (Bellman-Ford)."""
        distance_E = np.where(surplus_E > 0, 0, FAR)
        previous_E = np.full(len(surplus_E), -1)
        frontier = np.flatnonzero(surplus_E > 0)
        while len(frontier):
            through_QE = distance_E[frontier, None] + self.price_EE[frontier]
            best_E = through_QE.argmin(0)
            shorter_E = through_QE[best_E, np.arange(len(best_E))]
            better_E = shorter_E < distance_E
            distance_E[better_E], previous_E[better_E] = shorter_E[better_E], frontier[best_E[better_E]]
            frontier = np.flatnonzero(better_E)
        chain = [int(np.where(surplus_E < 0, distance_E, FAR + 1).argmin())]
        while previous_E[chain[-1]] >= 0:
            chain.append(int(previous_E[chain[-1]]))
        return chain[::-1]

    def shift(self, chain: list[int], *, at_most: int) -> int:
        """Move as many units as cost the same along every link of the chain; returns how many."""
        links = list(zip(chain[:-1], chain[1:], strict=True))
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
        return members_M[extra_M == self.price_EE[source, target]]
