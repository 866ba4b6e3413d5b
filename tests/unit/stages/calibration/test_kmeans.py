import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from stages.calibration.balanced import fit_balanced_kmeans, mean_directions, seed_centroids

NEURONS, E, C = 45, 3, 7


def planted(seed=0):
    generator = torch.Generator().manual_seed(seed)
    group_U = torch.randperm(NEURONS, generator=generator) % E
    centres_EC = torch.randn(E, C, generator=generator)
    return centres_EC[group_U] + 0.2 * torch.randn(NEURONS, C, generator=generator), group_U


def same_partition(first_U, second_U):
    return torch.equal(first_U[:, None] == first_U, second_U[:, None] == second_U)


@pytest.mark.parametrize("decades", [0, 3])
def test_planted_groups_are_found_whatever_the_length_of_the_features(decades):
    features_UC, group_U = planted()
    lengths_U1 = torch.logspace(-decades, decades, NEURONS)[:, None]
    labels_U = fit_balanced_kmeans(features_UC * lengths_U1, torch.full((E,), 15), rng=np.random.default_rng(0))
    assert same_partition(labels_U, group_U)


def test_more_rounds_never_fit_worse():
    features_UC = torch.randn(200, C, generator=torch.Generator().manual_seed(1))
    directions_UC = normalize(features_UC, dim=1)
    totals = []
    for iterations in (1, 2, 4, 30):
        labels_U = fit_balanced_kmeans(
            features_UC, torch.full((8,), 25), iterations=iterations, rng=np.random.default_rng(0)
        )
        centroids_EC = mean_directions(directions_UC, labels_U, 8)
        totals.append(float((directions_UC * centroids_EC[labels_U]).sum()))
    assert totals == sorted(totals)
    assert totals[-1] > totals[0]


def test_sizes_are_kept_and_draws_are_seeded():
    features_UC, _group = planted()
    sizes_E = torch.tensor([20, 5, 20])
    first_U = fit_balanced_kmeans(features_UC, sizes_E, iterations=5, rng=np.random.default_rng(1))
    assert torch.equal(first_U.bincount(), sizes_E)
    assert torch.equal(first_U, fit_balanced_kmeans(features_UC, sizes_E, iterations=5, rng=np.random.default_rng(1)))


@pytest.mark.parametrize("dead", [11, NEURONS])
def test_neurons_without_direction_fill_what_is_left(dead):
    features_UC, group_U = planted()
    features_UC[:dead] = 0
    labels_U = fit_balanced_kmeans(features_UC, torch.full((E,), 15), iterations=20, rng=np.random.default_rng(0))
    assert labels_U.bincount().tolist() == [15, 15, 15]
    assert same_partition(labels_U[dead:], group_U[dead:])


def test_an_empty_cluster_has_no_direction():
    directions_UC = normalize(torch.randn(4, C, generator=torch.Generator().manual_seed(0)), dim=1)
    centroids_EC = mean_directions(directions_UC, torch.tensor([0, 0, 2, 2]), 3)
    assert not centroids_EC[1].any()
    torch.testing.assert_close(centroids_EC[[0, 2]].norm(dim=1), torch.ones(2))


def test_first_centroids_lie_apart():
    directions_UC = torch.eye(4, C).repeat_interleave(50, dim=0)
    for seed in range(5):
        centroids_EC = seed_centroids(directions_UC, 4, np.random.default_rng(seed))
        assert sorted(centroids_EC.argmax(1).tolist()) == [0, 1, 2, 3]
