import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment

from stages.calibration.balanced import fit_balanced_kmeans, mean_directions
from stages.cluster.methods import group_sizes
from stages.cluster.report import measure_objective

NEURONS, E, C = 70, 6, 9


def measure(features_UC, labels_U, experts=E):
    return measure_objective(features_UC, labels_U, experts, rng=np.random.default_rng(0))


def draw(seed=0):
    return torch.randn(NEURONS, C, generator=torch.Generator().manual_seed(seed))


def test_experts_of_equal_neurons_are_wholly_similar():
    labels_U = torch.arange(NEURONS) % E
    found = measure(torch.eye(E, C)[labels_U] * torch.arange(1.0, NEURONS + 1)[:, None], labels_U)
    assert found.similarity == pytest.approx(1)
    assert found.by_chance < 0.6
    assert found.gap == 0


def test_finished_k_means_leaves_no_gap_and_one_round_does():
    features_UC, sizes_E = draw(), group_sizes(NEURONS, E)
    once, done = (
        measure(features_UC, fit_balanced_kmeans(features_UC, sizes_E, iterations=rounds, rng=np.random.default_rng(0)))
        for rounds in (1, 99)
    )
    assert done.gap < 1e-7 < once.gap < 0.3
    assert done.similarity > once.similarity > once.by_chance


def test_the_gap_is_that_to_the_exact_assignment():
    features_UC, labels_U = draw(1), torch.arange(NEURONS) % E
    directions_UC = torch.nn.functional.normalize(features_UC, dim=1)
    slots_US = (directions_UC @ mean_directions(directions_UC, labels_U, E).T).double()[:, labels_U.sort().values]
    best = slots_US.numpy()[linear_sum_assignment(slots_US.numpy(), maximize=True)].sum()
    found = measure(features_UC, labels_U)
    assert found.gap == pytest.approx(1 - found.similarity * NEURONS / best, abs=1e-6)


def test_neurons_without_direction():
    found = measure(torch.zeros(NEURONS, C), torch.arange(NEURONS) % E)
    assert found == (0, 0, 0)
