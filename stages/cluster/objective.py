"""How alike the units of an expert are, beside what chance and what the best assignment would give."""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from stages.cluster.balance import assign_balanced
from stages.cluster.kmeans import mean_directions, total_similarity


class Objective(NamedTuple):
    """Mean cosine of a unit to the mean direction of its expert."""

    similarity: float
    by_chance: float  # of units dealt out at random into groups of the same sizes
    gap: float  # share by which the best assignment to the experts' mean directions is better; 0 where k-means is done


def measure_objective(
    features_UC: Float[Tensor, "U C"], labels_U: Int[Tensor, "U"], experts: int, *, rng: np.random.Generator
) -> Objective:
    """The objective of k-means for one grouping, and what to hold it against.

    Args:
        features_UC: ``(U, C)`` what was compared.
        labels_U: ``(U,)`` expert of each unit, before copies.
        experts: E.
        rng: deals out the units at random.
    """
    directions_UC = normalize(features_UC, dim=1)
    dealt_U = labels_U[torch.from_numpy(rng.permutation(len(labels_U)))]
    total = total_similarity(directions_UC, labels_U, experts)
    affinity_UE = directions_UC @ mean_directions(directions_UC, labels_U, experts).T
    best_U = assign_balanced(affinity_UE, labels_U.bincount(minlength=experts)).labels_U
    best = float(affinity_UE.double().gather(1, best_U[:, None]).sum())
    count = max(1, len(labels_U))
    return Objective(
        total / count,
        total_similarity(directions_UC, dealt_U, experts) / count,
        gap=max(0.0, 1 - total / best) if best > 0 else 0.0,
    )
