"""How many experts each layer gives to a pool."""

from dataclasses import replace

import pytest
import torch

from models.config import MoEShape
from stages.artifacts.statistics import Scores
from stages.cluster.allocation import count_best, layer_shapes, share_experts, weigh_layers

L, F = 3, 40
NAMES = ("equal", "contribution", "score")


@pytest.fixture
def scores():
    """Layer 0 has a few outstanding neurons, layer 1 many, layer 2 none; S_p of layer 2 is on a far larger scale."""
    noise_LF = 0.1 * torch.rand(L, F, generator=torch.Generator().manual_seed(0))
    s_p_LF = noise_LF.clone()
    s_p_LF[0, :4] += 1
    s_p_LF[1, :16] += 1
    s_p_LF[2] = 1000 + 50 * noise_LF[2]
    return Scores("s_p", "s_p", s_p_LF)


@pytest.fixture
def statistics(plant):
    """Contributions of the layers as 3 : 1 : 2."""
    planted = plant(layers=L, width=F).statistics
    shares_LF = torch.tensor([[3.0], [1.0], [2.0]]).double().expand(L, F)
    return replace(planted, sum_abs=shares_LF, weight_norm_down=torch.ones(L, F))


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


def test_neurons_are_told_apart_within_their_own_layer(scores):
    """A layer whose scores are all large is not favoured; one with few outstanding neurons has the most outstanding."""
    assert count_best(scores.chosen, 4).tolist() == [4, 0, 0]
    assert count_best(scores.chosen, L * F).tolist() == [F] * L
    shifted_LF = scores.chosen * torch.tensor([[2.0], [30.0], [0.1]]) + torch.tensor([[5.0], [-7.0], [0.0]])
    assert torch.equal(count_best(shifted_LF, 30), count_best(scores.chosen, 30))
    assert count_best(torch.ones(L, F), 30).sum() == 30


def test_shares_by_each_measure(scores, statistics):
    shape = MoEShape(12, 5, 4, 0, "global_pool")
    given = {name: [own.experts for own in layer_shapes(shape, name, scores, statistics)] for name in NAMES}
    assert given["equal"] == [4, 4, 4]
    assert given["contribution"] == [6, 2, 4]
    assert sum(given["score"]) == 12
    assert given["score"] != given["equal"]


def test_what_is_left_over_goes_where_the_best_neurons_are(scores, statistics):
    best_L = count_best(scores.chosen, 20)
    given = [own.experts for own in layer_shapes(MoEShape(4, 5, 2, 0, "global_pool"), "equal", scores, statistics)]
    assert sorted(given) == [1, 1, 2]
    assert given.index(2) == int(best_L.argmax())


def test_every_layer_gives_one_where_there_are_as_many(scores, statistics):
    assert weigh_layers("score", scores, statistics, 4).tolist() == [4, 0, 0]
    for experts, least in ((3, 1), (4, 1), (2, 0)):
        given = [
            own.experts for own in layer_shapes(MoEShape(experts, 1, 1, 0, "global_pool"), "score", scores, statistics)
        ]
        assert sum(given) == experts
        assert min(given) == least


def test_a_layer_chooses_among_its_own_as_a_part_of_them(scores, statistics):
    shapes = layer_shapes(MoEShape(12, 5, 4, 3, "global_pool"), "contribution", scores, statistics)
    assert [(own.experts, own.top_k) for own in shapes] == [(6, 3), (2, 1), (4, 2)]
    assert {(own.n, own.always_on, own.pooled) for own in shapes} == {(5, 3, True)}


def test_no_copies_where_the_model_has_neurons_enough(scores, statistics):
    """Layer 0 would be given 9 of 15 experts, and has neurons for 8."""
    shapes = layer_shapes(MoEShape(16, 5, 4, 0, "global_pool"), "contribution", scores, statistics)
    assert max(own.experts for own in shapes) == 8
    crowded = layer_shapes(MoEShape(30, 5, 4, 0, "global_pool"), "contribution", scores, statistics)
    assert [own.experts for own in crowded] == [10, 10, 10]
