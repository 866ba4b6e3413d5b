"""Methods that group neurons: each neuron gets one home expert, and an affinity to every expert."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from stages.cluster.router_aware import TokenEnergy, assign_balanced, members, place_copies, regroup

ITERATIONS = 20  # maximum for k-means and for router_aware; both stop when no neuron moves


def fit_balanced_kmeans(
    features_UC: Float[Tensor, "U C"],
    sizes_E: Int[Tensor, "E"],
    *,
    rng: np.random.Generator,
    iterations: int = ITERATIONS,
) -> Int[Tensor, "U"]:
    """Group neurons by cosine similarity into clusters of exactly the given sizes, which sum to U; zeros are allowed.

    Each of at most `iterations` rounds assigns neurons to centroids with the highest total similarity that the sizes
    allow, then moves the centroids. The total never falls; the loop ends when no neuron moves. Zero rows, neurons
    without direction, fill the remaining places.

    Returns:
        ``(U,)`` int64 cluster of each neuron.
    Source: spherical k-means (Dhillon, Modha 2001) with the assignment step constrained to sizes.
    """
    directions_UC = normalize(features_UC, dim=1)
    centroids_EC = seed_centroids(directions_UC, len(sizes_E), rng)
    labels_U = torch.full((len(directions_UC),), -1)
    for _ in range(iterations):
        previous_U = labels_U
        labels_U = assign_balanced(directions_UC @ centroids_EC.T, sizes_E)
        if torch.equal(labels_U, previous_U):
            break
        centroids_EC = mean_directions(directions_UC, labels_U, len(sizes_E))
    return labels_U


def total_similarity(directions_UC: Float[Tensor, "U C"], labels_U: Int[Tensor, "U"], clusters: int) -> float:
    """The objective of k-means: Σ of every neuron's cosine to the mean direction of its cluster."""
    return float((directions_UC * mean_directions(directions_UC, labels_U, clusters)[labels_U]).double().sum())


def mean_directions(
    directions_UC: Float[Tensor, "U C"], labels_U: Int[Tensor, "U"], clusters: int
) -> Float[Tensor, "E C"]:
    """Mean direction of every cluster, of length 1; zero if the cluster is empty or its directions cancel."""
    sums_EC = torch.zeros(clusters, directions_UC.shape[1]).index_add_(0, labels_U, directions_UC)
    return normalize(sums_EC, dim=1)


def seed_centroids(
    directions_UC: Float[Tensor, "U C"], clusters: int, rng: np.random.Generator
) -> Float[Tensor, "E C"]:
    """Draw distant initial centroids: each neuron with a probability proportional to 1 − its similarity to the nearest.

    Source: k-means++ (Arthur, Vassilvitskii 2007), with cosine distance.
    """
    chosen = [int(rng.integers(len(directions_UC)))]
    distance_U = torch.full((len(directions_UC),), torch.inf, dtype=torch.float64)
    while len(chosen) < clusters:
        to_last_U = 1 - (directions_UC @ directions_UC[chosen[-1]]).double()
        distance_U = distance_U.minimum(to_last_U.clamp_min(0))
        weights_U = distance_U + 1e-12  # defines the draw if every neuron coincides with a centroid
        chosen.append(int(rng.choice(len(weights_U), p=(weights_U / weights_U.sum()).numpy())))
    return directions_UC[chosen]


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
