"""The compiled solver of the balanced assignment: neurons join one by one, and cheapest chains of moves make room.

Importing numba takes half a second, so this module is imported only where something is solved.
"""

from collections.abc import Callable
from inspect import unwrap
from typing import NamedTuple, TypeVar

import numpy as np
from numba import njit
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Kernel = TypeVar("Kernel", bound=Callable[..., object])

FAR = 1e300


def _compiled(function: Kernel) -> Kernel:
    """Compile, without Python's lock while it runs; cached where a folder can be written. Tests wrap functions."""
    plain = unwrap(function)
    try:
        kernel: Kernel = njit(nogil=True, cache=True)(plain)
    except RuntimeError:  # neither this folder nor the user's cache can be written
        kernel = njit(nogil=True)(plain)
    return kernel


class _State(NamedTuple):
    """An assignment of some neurons, the best one for the sizes it has.

    Proof: at these prices no move gains anything, as `loss_EE[e, f] + price_E[f] − price_E[e]` is at or above 0.
    """

    affinity_UE: Floats
    price_E: Floats
    count_E: Integers
    held_EN: Integers  # neurons of every expert; only the first `count_E[e]` are valid
    loss_EE: Floats  # least affinity lost when a neuron moves from e to f
    mover_EE: Integers  # place of that neuron in `held_EN[e]`


@_compiled
def _add(state: _State, expert: int, neuron: int) -> None:
    """Add a neuron to an expert."""
    place, here = state.count_E[expert], state.affinity_UE[neuron, expert]
    state.held_EN[expert, place] = neuron
    state.count_E[expert] = place + 1
    for other in range(len(state.count_E)):
        loss = here - state.affinity_UE[neuron, other]
        if loss < state.loss_EE[expert, other]:
            state.loss_EE[expert, other] = loss
            state.mover_EE[expert, other] = place


@_compiled
def _remove(state: _State, expert: int, place: int) -> None:
    """Remove the neuron at this place of an expert; the last one takes its place."""
    last = state.count_E[expert] - 1
    state.held_EN[expert, place] = state.held_EN[expert, last]
    state.count_E[expert] = last
    for other in range(len(state.count_E)):
        if state.mover_EE[expert, other] == place:
            least, mover = FAR, -1
            for candidate in range(last):
                neuron = state.held_EN[expert, candidate]
                loss = state.affinity_UE[neuron, expert] - state.affinity_UE[neuron, other]
                if loss < least:
                    least, mover = loss, candidate
            state.loss_EE[expert, other] = least
            state.mover_EE[expert, other] = mover
        elif state.mover_EE[expert, other] == last:
            state.mover_EE[expert, other] = place


@_compiled
def _find_room(state: _State, sizes_E: Integers, source: int, previous_E: Integers) -> int:
    """The expert with room that the cheapest chain of moves from `source` reaches (Dijkstra's algorithm).

    `previous_E` receives the links of the chain. Prices rise so that each of its moves loses nothing.
    """
    experts = len(sizes_E)
    distance_E, is_final_E = np.full(experts, FAR), np.zeros(experts, np.bool_)
    distance_E[source] = 0.0
    while True:
        nearest, reach = -1, FAR
        for expert in range(experts):
            if not is_final_E[expert] and distance_E[expert] < reach:
                nearest, reach = expert, distance_E[expert]
        if state.count_E[nearest] < sizes_E[nearest]:
            break
        is_final_E[nearest] = True
        for expert in range(experts):
            step = state.loss_EE[nearest, expert] + state.price_E[expert] - state.price_E[nearest]
            through = reach + max(step, 0.0)  # below 0 only by rounding
            if not is_final_E[expert] and through < distance_E[expert]:
                distance_E[expert], previous_E[expert] = through, nearest
    for expert in range(experts):
        if is_final_E[expert]:
            state.price_E[expert] += reach - distance_E[expert]
    return nearest


@_compiled
def solve_transport(affinity_UE: Floats, sizes_E: Integers, price_E: Floats) -> Integers:
    """The expert of each neuron, of the highest summed affinity; see `assign_balanced`. Changes the prices."""
    neurons, experts = affinity_UE.shape
    count_E, previous_E = np.zeros(experts, np.int64), np.zeros(experts, np.int64)
    held_EN = np.zeros((experts, sizes_E.max() + 1), np.int64)
    loss_EE, mover_EE = np.full((experts, experts), FAR), np.full((experts, experts), -1)
    state = _State(affinity_UE, price_E, count_E, held_EN, loss_EE, mover_EE)
    for neuron in range(neurons):
        source = int(np.argmax(affinity_UE[neuron] - price_E))
        _add(state, source, neuron)
        if count_E[source] > sizes_E[source]:
            end = _find_room(state, sizes_E, source, previous_E)
            while end != source:  # from the last move to the first, so that no neuron moves twice
                start = previous_E[end]
                place = mover_EE[start, end]
                moved = held_EN[start, place]
                _remove(state, start, place)
                _add(state, end, moved)
                end = start
    labels_U = np.empty(neurons, np.int64)
    for expert in range(experts):
        labels_U[held_EN[expert, : count_E[expert]]] = expert
    return labels_U
