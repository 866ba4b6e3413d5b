"""Assign neurons to groups of given sizes: the best balanced assignment, and k-means with it."""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from instruments.errors import NumericsError

ITERATIONS = 20  # maximum for k-means and for cluster=router_aware; both stop when no neuron moves


def assign_balanced(
    affinity_UE: Float[Tensor, "U E"], sizes_E: Int[Tensor, "E"], prices_E: Float[Tensor, "E"] | None = None
) -> Int[Tensor, "U"]:
    """Give every neuron an expert so that expert e gets exactly `sizes_E[e]` and the summed affinity is the highest.

    Neurons join one by one the expert of highest affinity − price. If it is full, the cheapest chain of moves leads to
    an expert with room. Chains run between the E experts, not the U neurons of the usual assignment problem.

    Args:
        affinity_UE: ``(U, E)`` on the CPU.
        sizes_E: ``(E,)`` they sum to U; zeros are allowed.
        prices_E: ``(E,)`` fp64 prices to start from, replaced by the final ones: those of a similar problem save time.
            None: zeros.
    Returns:
        ``(U,)`` int64 expert of each neuron.
    Raises:
        NumericsError: an affinity is not finite.
    Numerics: the exact optimum in fp64; ties are broken deterministically, but depend on the prices at the start.
    Source: successive shortest paths with potentials (Ahuja, Magnanti, Orlin, Network Flows, 1993, section 9.7).
    """
    from stages.calibration.transport import solve_transport  # noqa: PLC0415 - imports numba

    if not affinity_UE.isfinite().all():
        what = "the affinities of neurons to experts are not finite"
        raise NumericsError(what, do="calibrate in float32: model.dtype=float32")
    prices_E = torch.zeros(len(sizes_E), dtype=torch.float64) if prices_E is None else prices_E
    affinity = affinity_UE.double().contiguous().numpy()
    return torch.from_numpy(solve_transport(affinity, sizes_E.numpy(), prices_E.numpy()))


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
    labels_U, prices_E = torch.full((len(directions_UC),), -1), torch.zeros(len(sizes_E), dtype=torch.float64)
    for _ in range(iterations):
        previous_U = labels_U
        labels_U = assign_balanced(directions_UC @ centroids_EC.T, sizes_E, prices_E)
        if torch.equal(labels_U, previous_U):
            break
        centroids_EC = mean_directions(directions_UC, labels_U, len(sizes_E))
    return labels_U


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
