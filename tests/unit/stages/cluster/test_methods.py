import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from stages.cluster.methods import fill_experts, group_neurons, group_sizes, project_on_top_directions, unpack_bits

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


@pytest.mark.parametrize(
    ("neurons", "groups", "sizes"), [(10, 4, [3, 3, 2, 2]), (12, 3, [4, 4, 4]), (2, 5, [1, 1, 0, 0, 0])]
)
def test_sizes_differ_by_one_at_most(neurons, groups, sizes):
    assert group_sizes(neurons, groups).tolist() == sizes


def test_room_goes_to_the_neurons_that_fit_best():
    labels_U = torch.tensor([0, 1, 2, 0, 1])
    affinity_UE = torch.tensor([[0.1, 0.9, 0.0], [0.5, 0.2, 0.3], [0.7, 0.0, 0.0], [0.0, 0.8, 0.1], [0.6, 0.0, 0.3]])
    # An expert's own neurons come first, even with low affinity; then experts 0, 1 and 2 add 2, 0 and (1, 4).
    assert fill_experts(affinity_UE, labels_U, 3).tolist() == [[0, 2, 3], [0, 1, 4], [1, 2, 4]]


F, R, D = 37, 21, 9


@pytest.fixture
def bits_FR():
    bits_FR = np.random.default_rng(0).random((F, R)) < 0.3
    bits_FR[4] = False
    return bits_FR


def rng():
    return np.random.default_rng(1)


def cosines(rows):
    rows = normalize(rows, dim=1)
    return rows @ rows.T


def test_bits_come_back(bits_FR):
    packed_FR = torch.from_numpy(np.packbits(bits_FR, axis=1))
    assert torch.equal(unpack_bits(packed_FR, R), torch.from_numpy(bits_FR).float())


def test_with_all_directions_the_cosine_is_the_share_of_tokens_where_both_fire(bits_FR):
    features_FC = project_on_top_directions(torch.from_numpy(bits_FR).float(), 64, rng())
    assert features_FC.shape == (F, R)
    bits = bits_FR.astype(float)
    fires = bits.sum(1)
    expected = bits @ bits.T / np.sqrt(np.outer(fires, fires).clip(1))
    torch.testing.assert_close(cosines(features_FC), torch.from_numpy(expected).float())


def test_few_directions_keep_what_the_best_ones_keep():
    gate_FD = torch.randn(F, 3, generator=torch.Generator().manual_seed(0)) @ torch.randn(
        3, D, generator=torch.Generator().manual_seed(1)
    )
    noisy_FD = gate_FD + 0.01 * torch.randn(F, D, generator=torch.Generator().manual_seed(2))
    features_FC = project_on_top_directions(noisy_FD, 3, rng())
    assert features_FC.shape == (F, 3)
    assert features_FC.dtype == torch.float32
    torch.testing.assert_close(cosines(features_FC), cosines(gate_FD), atol=0.05, rtol=0)
