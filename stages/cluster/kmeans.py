"""Balanced k-means on directions: groups of set sizes whose members point the same way."""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from stages.cluster.balance import assign_balanced


def fit_balanced_kmeans(
    features_UC: Float[Tensor, "U C"],
    sizes_E: Int[Tensor, "E"],
    *,
    iterations: int,
    rng: np.random.Generator,
    restarts: int = 1,
    start: Int[Tensor, "U"] | None = None,
) -> Int[Tensor, "U"]:
    """Group units by cosine similarity into clusters of exactly the given sizes.

    Each round assigns units to centroids at the highest total similarity the sizes allow, then moves the centroids;
    the total never falls, and the loop ends when no unit moves.

    Args:
        features_UC: ``(U, C)`` fp32, finite; a zero row is a unit without direction and fills what is left.
        sizes_E: ``(E,)`` units per cluster; sums to U, zeros allowed.
        iterations: most rounds, at least 1.
        rng: draws the first centroids.
        restarts: times the loop is run, at least 1; the clusters of the highest total are kept.
        start: ``(U,)`` clusters whose means are the first centroids of the first run, of any sizes; None draws them.
    Returns:
        ``(U,)`` int64 cluster of each unit.
    Source: spherical k-means (Dhillon, Modha 2001) with the assignment step constrained to sizes.
    """
    directions_UC = normalize(features_UC, dim=1)
    clusters = len(sizes_E)
    best_U, best_total = torch.full((len(features_UC),), -1), -torch.inf
    for number in range(restarts):
        if start is not None and number == 0:
            centroids_EC = mean_directions(directions_UC, start, clusters)
        else:
            centroids_EC = seed_centroids(directions_UC, clusters, rng)
        labels_U = _improve(directions_UC, centroids_EC, sizes_E, iterations)
        total = total_similarity(directions_UC, labels_U, clusters)
        if total > best_total:
            best_U, best_total = labels_U, total
    return best_U


def _improve(directions_UC: Tensor, centroids_EC: Tensor, sizes_E: Tensor, iterations: int) -> Tensor:
    """Rounds of assigning units and moving centroids until no unit moves."""
    labels_U, prices_E = torch.full((len(directions_UC),), -1), None
    for _ in range(iterations):
        previous_U = labels_U
        labels_U, prices_E = assign_balanced(directions_UC @ centroids_EC.T, sizes_E, prices_E=prices_E)
        if torch.equal(labels_U, previous_U):
            break
        centroids_EC = mean_directions(directions_UC, labels_U, len(sizes_E))
    return labels_U


def total_similarity(directions_UC: Float[Tensor, "U C"], labels_U: Int[Tensor, "U"], clusters: int) -> float:
    """Σ of every unit's cosine to the mean direction of its cluster: what k-means makes large."""
    return float((directions_UC * mean_directions(directions_UC, labels_U, clusters)[labels_U]).double().sum())


def mean_directions(
    directions_UC: Float[Tensor, "U C"], labels_U: Int[Tensor, "U"], clusters: int
) -> Float[Tensor, "E C"]:
    """Unit-length mean of every cluster; zero where a cluster is empty or cancels out."""
    sums_EC = torch.zeros(clusters, directions_UC.shape[1]).index_add_(0, labels_U, directions_UC)
    return normalize(sums_EC, dim=1)


def seed_centroids(
    directions_UC: Float[Tensor, "U C"], clusters: int, rng: np.random.Generator
) -> Float[Tensor, "E C"]:
    """Draw starting centroids that lie apart: each next one with probability 1 − its similarity to the nearest.

    Source: k-means++ (Arthur, Vassilvitskii 2007), with cosine distance.
    """
    chosen = [int(rng.integers(len(directions_UC)))]
    distance_U = torch.full((len(directions_UC),), torch.inf, dtype=torch.float64)
    while len(chosen) < clusters:
        to_last_U = 1 - (directions_UC @ directions_UC[chosen[-1]]).double()
        distance_U = distance_U.minimum(to_last_U.clamp_min(0))
        weights_U = distance_U + 1e-12  # keeps the draw defined when every unit coincides with a centroid
        chosen.append(int(rng.choice(len(weights_U), p=(weights_U / weights_U.sum()).numpy())))
    return directions_UC[chosen]
