"""Experts trade units until each has as many as it takes: the inner loop of the balanced assignment, compiled."""

from inspect import unwrap

import numpy as np
from numba import njit
from numpy.typing import NDArray

Integers = NDArray[np.int64]

FAR = np.int64(2**60)


def trade(cost_UE: Integers, prices_E: Integers, labels_U: Integers, surplus_E: Integers) -> None:
    """Pass units on along cheapest chains of moves until no expert has too many; changes all but the costs.

    `extra_EE[e, f]` is the cost of the cheapest move of a unit from e to f. Prices keep
    `extra_EE[e, f] + prices_E[f] − prices_E[e]` at or above 0 for all pairs, which proves the labels to be the cheapest
    for the sizes they have.

    Args:
        cost_UE: ``(U, E)`` of every unit in every expert.
        prices_E: ``(E,)`` what an expert costs beside.
        labels_U: ``(U,)`` where cost and price together are lowest.
        surplus_E: ``(E,)`` units an expert has too many; sums to 0.
    """
    experts = len(prices_E)
    extra_EE = np.full((experts, experts), FAR)
    for expert in range(experts):
        _refresh(extra_EE, cost_UE, labels_U, expert)
    while surplus_E.max() > 0:
        source = int(surplus_E.argmax())
        target, previous_E = _find_chain(source, extra_EE, prices_E, surplus_E)
        moved = min(surplus_E[source], -surplus_E[target])
        expert = target
        while expert != source:
            moved = min(moved, _shift(extra_EE, cost_UE, labels_U, previous_E[expert], expert, 0))
            expert = previous_E[expert]
        surplus_E[source] -= moved
        surplus_E[target] += moved
        while target != source:  # from the last link to the first, so that no unit moves twice
            _shift(extra_EE, cost_UE, labels_U, previous_E[target], target, moved)
            _refresh(extra_EE, cost_UE, labels_U, target)
            target = previous_E[target]
        _refresh(extra_EE, cost_UE, labels_U, source)


def _refresh(extra_EE: Integers, cost_UE: Integers, labels_U: Integers, source: int) -> None:
    """Recompute what it costs to move a unit out of `source`."""
    extra_E = extra_EE[source]
    extra_E[:] = FAR
    for unit in range(len(labels_U)):
        if labels_U[unit] == source:
            for expert in range(len(extra_E)):
                extra_E[expert] = min(extra_E[expert], cost_UE[unit, expert] - cost_UE[unit, source])


def _find_chain(source: int, extra_EE: Integers, prices_E: Integers, surplus_E: Integers) -> tuple[int, Integers]:
    """The cheapest chain of moves from `source` to an expert that wants units (Dijkstra): its end, and its links back.

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
        if surplus_E[nearest] < 0:
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
    """Move units whose move from `source` to `target` costs the least; returns how many of them there were."""
    found = 0
    for unit in range(len(labels_U)):
        if labels_U[unit] == source and cost_UE[unit, target] - cost_UE[unit, source] == extra_EE[source, target]:
            if found < at_most:
                labels_U[unit] = target
            found += 1
    return found


# What tests wrap for type checks is unwrapped.
_compiled = njit(cache=True)
_refresh = _compiled(unwrap(_refresh))
_find_chain = _compiled(unwrap(_find_chain))
_shift = _compiled(unwrap(_shift))
trade = _compiled(unwrap(trade))
