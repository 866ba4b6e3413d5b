import numpy as np
import pytest
import torch

from stages.cluster.methods import fill_experts, group_neurons

NEURONS, E = 14, 4
SCORES = torch.tensor([0.3, 0.9, 0.1, 0.8, 0.2, 0.7, 0.6, 0.5, 0.4, 1.0, 1.1, 1.2, 1.3, 1.4])


def group(method, *, seed=0, features=None):
    def unwanted():
        raise AssertionError("features of a method that compares none")

    scores_U, given = (SCORES, unwanted) if features is None else (SCORES[: len(features)], lambda: features)
    return group_neurons(method, scores_U, given, unwanted, E, 0, rng=np.random.default_rng(seed))


def test_rank_deals_in_score_order():
    labels_U = group("rank")[0]
    assert labels_U[SCORES.argsort(descending=True)].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1]


def test_contiguous_cuts_where_the_weights_lie():
    assert group("contiguous")[0].tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_random_is_balanced_and_seeded():
    labels_U = group("random")[0]
    assert labels_U.bincount().tolist() == [4, 4, 3, 3]
    assert torch.equal(labels_U, group("random")[0])
    assert not torch.equal(labels_U, group("random", seed=1)[0])


def test_similar_neurons_share_an_expert():
    group_U = torch.arange(3 * E) % E
    features_UC = torch.eye(E, 6)[group_U] * torch.arange(1.0, 3 * E + 1)[:, None]
    labels_U, affinity_UE = group("balanced_kmeans", features=features_UC)
    assert torch.equal(labels_U[:, None] == labels_U, group_U[:, None] == group_U)
    torch.testing.assert_close(affinity_UE, torch.nn.functional.one_hot(labels_U, E).float())


@pytest.mark.parametrize("method", ["rank", "random", "contiguous"])
@pytest.mark.parametrize("size", [4, 7, 13])
def test_blind_methods_spread_copies_evenly(method, size):
    labels_U, affinity_UE = group(method)
    copies_U = fill_experts(affinity_UE, labels_U, size).flatten().bincount(minlength=NEURONS)
    even = E * size / NEURONS
    assert copies_U.min() >= int(even) - 1
    assert copies_U.max() <= int(even) + 2


def test_contiguous_copies_come_from_the_next_group():
    labels_U, affinity_UE = group("contiguous")
    assert fill_experts(affinity_UE, labels_U, 5).tolist() == [
        [0, 1, 2, 3, 4],
        [4, 5, 6, 7, 8],
        [8, 9, 10, 11, 12],
        [0, 1, 11, 12, 13],
    ]
