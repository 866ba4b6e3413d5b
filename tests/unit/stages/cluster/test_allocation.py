"""Number of experts that each layer contributes to a pool."""

import pytest
import torch

from models.config import MoEShape
from stages.cluster.layer import count_best, layer_shapes, share_experts

L, F = 3, 40


@pytest.fixture
def scores_LF():
    """Layer 0 has 4 neurons of high S_p, layer 1 has 16, layer 2 none; layer 2 has a far larger scale."""
    noise_LF = 0.1 * torch.rand(L, F, generator=torch.Generator().manual_seed(0))
    s_p_LF = noise_LF.clone()
    s_p_LF[0, :4] += 1
    s_p_LF[1, :16] += 1
    s_p_LF[2] = 1000 + 50 * noise_LF[2]
    return s_p_LF


@pytest.mark.parametrize(
    ("weights", "experts", "least", "most", "expected"),
    [
        ([1.0, 1.0, 1.0], 6, 1, 9, [2, 2, 2]),
        ([1.0, 1.0, 1.0], 5, 1, 9, [2, 2, 1]),
        ([6.0, 3.0, 1.0], 10, 1, 9, [6, 3, 1]),
        ([6.0, 3.0, 0.0], 10, 1, 9, [6, 3, 1]),
        ([6.0, 3.0, 0.0], 9, 0, 9, [6, 3, 0]),
        ([98.0, 1.0, 1.0], 9, 1, 4, [4, 3, 2]),
        ([98.0, 1.0, 1.0], 12, 1, 4, [4, 4, 4]),
        ([1.0, 5.0, 2.0], 2, 0, 9, [0, 1, 1]),
        ([0.0, 0.0, 0.0], 4, 1, 2, [2, 1, 1]),
    ],
)
def test_experts_are_dealt_in_proportion_and_within_bounds(weights, experts, least, most, expected):
    given_L = share_experts(torch.tensor(weights).double(), experts, least=least, most=most)
    assert given_L.tolist() == expected


def test_neurons_are_told_apart_within_their_own_layer(scores_LF):
    """Large scores in a whole layer are no advantage; the fewer high scores a layer has, the more they stand out."""
    assert count_best(scores_LF, 4).tolist() == [4, 0, 0]
    assert count_best(scores_LF, L * F).tolist() == [F] * L
    assert count_best(scores_LF, 3, always_on=4).tolist()[0] == 0  # its four best
    shifted_LF = scores_LF * torch.tensor([[2.0], [30.0], [0.1]]) + torch.tensor([[5.0], [-7.0], [0.0]])
    assert torch.equal(count_best(shifted_LF, 30), count_best(scores_LF, 30))
    assert count_best(torch.ones(L, F), 30).sum() == 30


def test_every_layer_gives_one_where_there_are_as_many(scores_LF):
    assert count_best(scores_LF, 4).tolist() == [4, 0, 0]
    for experts, least in ((3, 1), (4, 1), (2, 0)):
        given = [own.experts for own in layer_shapes(MoEShape(experts, 1, 1, 0, "global_pool"), scores_LF)]
        assert sum(given) == experts
        assert min(given) == least


def test_no_copies_where_the_model_has_neurons_enough(scores_LF):
    """Each layer has 40 neurons, enough for 8 experts of 5."""
    outstanding_LF = scores_LF.clone()
    outstanding_LF[0, ::2] += 100
    shapes = layer_shapes(MoEShape(16, 5, 4, 0, "global_pool"), outstanding_LF)
    assert max(own.experts for own in shapes) <= 8
    crowded = layer_shapes(MoEShape(30, 5, 4, 0, "global_pool"), scores_LF)
    assert [own.experts for own in crowded] == [10, 10, 10]
