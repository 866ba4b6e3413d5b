"""Ways to group units into experts. Each gives every unit a home and every pair of unit and expert an affinity."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from stages.cluster.captured import TokenEnergy, members, place_copies, regroup
from stages.cluster.evidence import LayerEvidence
from stages.cluster.fill import group_sizes
from stages.cluster.kmeans import fit_balanced_kmeans, mean_directions

Method = Literal["captured", "balanced_kmeans", "rank", "random", "contiguous"]


class Grouping(NamedTuple):
    """The home of each unit, and how well it fits every expert should there be room."""

    labels_U: Int[Tensor, "U"]
    affinity_UE: Float[Tensor, "U E"]


@dataclass(frozen=True)
class RoutedUnits:
    """The units to be grouped. Features are computed only for the method that compares them."""

    indices_U: Int[Tensor, "U"]  # among the layer's F
    scores_U: Float[Tensor, "U"]
    features_UC: Callable[[], Tensor]
    evidence: LayerEvidence | None = None  # of the whole layer
    energy: Callable[[], TokenEnergy] | None = None  # of the units, for the method that routes tokens
    size: int = 0  # N, for the method that places copies


def group_units(
    method: Method, units: RoutedUnits, experts: int, *, rng: np.random.Generator, iterations: int, restarts: int = 1
) -> Grouping:
    """Group the routed units of a layer."""
    match method:
        case "captured":
            return group_by_captured(units, experts, iterations=iterations, restarts=restarts, rng=rng)
        case "balanced_kmeans":
            return group_by_similarity(units.features_UC(), experts, iterations=iterations, restarts=restarts, rng=rng)
        case "rank":
            return deal_by_rank(units.scores_U, experts)
        case "random":
            return group_at_random(len(units.scores_U), experts, rng=rng)
        case "contiguous":
            return group_as_stored(len(units.scores_U), experts)


def group_by_similarity(
    features_UC: Float[Tensor, "U C"],
    experts: int,
    *,
    iterations: int,
    rng: np.random.Generator,
    restarts: int = 1,
    start: Int[Tensor, "U"] | None = None,
) -> Grouping:
    """Balanced k-means; the affinity is the cosine to the expert's mean direction."""
    sizes_E = group_sizes(len(features_UC), experts)
    labels_U = fit_balanced_kmeans(features_UC, sizes_E, iterations=iterations, rng=rng, restarts=restarts, start=start)
    directions_UC = normalize(features_UC, dim=1)
    return Grouping(labels_U, directions_UC @ mean_directions(directions_UC, labels_U, experts).T)


def group_by_captured(
    units: RoutedUnits, experts: int, *, iterations: int, rng: np.random.Generator, restarts: int = 1
) -> Grouping:
    """From balanced k-means on to what a router can capture; copies, where there is room, go where they are missed."""
    start = group_by_similarity(units.features_UC(), experts, iterations=iterations, restarts=restarts, rng=rng)
    assert units.energy is not None, "captured is streamed in config.py"
    energy = units.energy()
    sizes_E = group_sizes(len(start.labels_U), experts)
    labels_U = regroup(energy, start.labels_U, sizes_E, iterations=iterations)
    if experts * units.size <= len(labels_U):
        return Grouping(labels_U, members(labels_U, experts, energy.energy_TU).T.cpu())
    return Grouping(labels_U, place_copies(energy, labels_U, experts, units.size).T.cpu())


def deal_by_rank(scores_U: Float[Tensor, "U"], experts: int) -> Grouping:
    """Deal the units out in the order of their scores, so that every expert gets its share of strong ones."""
    order_U = scores_U.argsort(descending=True, stable=True)
    labels_U = torch.empty_like(order_U)
    labels_U[order_U] = torch.arange(len(order_U)) % experts
    return Grouping(labels_U, _affinity_in_turn(labels_U, experts))


def group_at_random(units: int, experts: int, *, rng: np.random.Generator) -> Grouping:
    """Seeded and blind to what the units do: the plain control."""
    labels_U = torch.from_numpy(rng.permutation(units)) % experts
    return Grouping(labels_U, _affinity_in_turn(labels_U, experts))


def group_as_stored(units: int, experts: int) -> Grouping:
    """Neighbours in the weight matrix share an expert."""
    labels_U = torch.arange(experts).repeat_interleave(group_sizes(units, experts))
    return Grouping(labels_U, _affinity_in_turn(labels_U, experts))


def _affinity_in_turn(labels_U: Int[Tensor, "U"], experts: int) -> Float[Tensor, "U E"]:
    """An expert with room takes the next group, then the one after: copies spread evenly over the units."""
    return -((labels_U[:, None] - torch.arange(experts)) % experts).float()
