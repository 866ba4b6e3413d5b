"""Methods that group neurons: each neuron gets one home expert, and an affinity to every expert."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from stages.calibration.balanced import ITERATIONS, fit_balanced_kmeans, mean_directions
from stages.cluster.router_aware import TokenEnergy, members, place_copies, regroup


def group_sizes(neurons: int, groups: int) -> Int[Tensor, "E"]:
    """Sizes that sum to `neurons` and differ by at most one."""
    sizes_E = torch.full((groups,), neurons // groups)
    sizes_E[: neurons % groups] += 1
    return sizes_E


def fill_experts(affinity_UE: Float[Tensor, "U E"], labels_U: Int[Tensor, "U"], size: int) -> Int[Tensor, "E N"]:
    """Fill every group, of at most `size` ≤ U neurons, to `size` with the neurons of highest affinity to it.

    Returns:
        ``(E, N)`` int64 neurons of each expert, ascending: every neuron at least once, none twice in an expert; ties go
        to the lower index.
    """
    fit_EU = affinity_UE.T.clone()
    fit_EU[labels_U, torch.arange(len(labels_U))] = torch.inf
    best_EU = fit_EU.argsort(dim=1, descending=True, stable=True)
    return best_EU[:, :size].sort(dim=1).values


Method = Literal["router_aware", "balanced_kmeans", "rank", "random", "contiguous"]


class Grouping(NamedTuple):
    """Each neuron's home expert, and its affinity to every expert, which decides where copies go."""

    labels_U: Int[Tensor, "U"]
    affinity_UE: Float[Tensor, "U E"]


@dataclass(frozen=True)
class NeuronsToGroup:
    """The neurons to group; features and energy are computed only for the methods that need them."""

    scores_U: Float[Tensor, "U"]
    features_UC: Callable[[], Tensor]
    energy: Callable[[], TokenEnergy] | None = None  # for router_aware
    size: int = 0  # N, for the copies of router_aware


def group_neurons(method: Method, neurons: NeuronsToGroup, experts: int, *, rng: np.random.Generator) -> Grouping:
    """Group the routed neurons of a layer."""
    match method:
        case "router_aware":
            return group_router_aware(neurons, experts, rng=rng)
        case "balanced_kmeans":
            return group_by_similarity(neurons.features_UC(), experts, rng=rng)
        case "rank":  # dealt out in score order: every expert gets its share of high scores
            labels_U = neurons.scores_U.argsort(descending=True, stable=True).argsort() % experts
        case "random":  # the control: independent of activations and weights
            labels_U = torch.from_numpy(rng.permutation(len(neurons.scores_U))) % experts
        case "contiguous":  # neighbours in the weight matrix share an expert
            labels_U = torch.arange(experts).repeat_interleave(group_sizes(len(neurons.scores_U), experts))
    # An expert with room copies the next group, then the one after, so that copies are spread evenly.
    return Grouping(labels_U, -((labels_U[:, None] - torch.arange(experts)) % experts).float())


def group_by_similarity(features_UC: Float[Tensor, "U C"], experts: int, *, rng: np.random.Generator) -> Grouping:
    """Balanced k-means; the affinity is the cosine to the expert's mean direction."""
    labels_U = fit_balanced_kmeans(features_UC, group_sizes(len(features_UC), experts), rng=rng)
    directions_UC = normalize(features_UC, dim=1)
    return Grouping(labels_U, directions_UC @ mean_directions(directions_UC, labels_U, experts).T)


def group_router_aware(neurons: NeuronsToGroup, experts: int, *, rng: np.random.Generator) -> Grouping:
    """Balanced k-means, then improve partition and router alternately; copy neurons where tokens would miss them."""
    start_U = group_by_similarity(neurons.features_UC(), experts, rng=rng).labels_U
    assert neurons.energy is not None, "router_aware needs a pass, see needs_pass in config.py"
    energy = neurons.energy()
    labels_U = regroup(energy, start_U, group_sizes(len(start_U), experts), iterations=ITERATIONS)
    if experts * neurons.size <= len(labels_U):
        return Grouping(labels_U, members(labels_U, experts, energy.energy_TU).T.cpu())
    return Grouping(labels_U, place_copies(energy, labels_U, experts, neurons.size).T.cpu())
