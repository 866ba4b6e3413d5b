import numpy as np
import pytest
import torch

from models.config import MoEShape
from stages.cluster.config import ClusterConfig
from stages.cluster.report import describe, measure_coactivation, share_of

F, R = 12, 19


@pytest.fixture
def bits_FR():
    return np.random.default_rng(0).random((F, R)) < 0.4


def packed(bits_FR):
    return torch.from_numpy(np.packbits(bits_FR, axis=1))


def pair_by_pair(bits_FR, experts):
    """Means over all pairs of different neurons, within one expert and between two, as defined."""
    within, between = [], []
    slots = [(e, neuron) for e, neurons in enumerate(experts) for neuron in neurons]
    for i, (e, neuron) in enumerate(slots):
        for f, other in slots[:i]:
            if neuron != other:
                (within if e == f else between).append((bits_FR[neuron] & bits_FR[other]).mean())
    return np.mean(within), np.mean(between)


@pytest.mark.parametrize(
    "experts",
    [[[0, 1, 2], [5, 7, 9], [3, 4, 11]], [[0, 1, 2, 3], [2, 3, 4, 5], [0, 2, 8, 10], [1, 2, 6, 11]]],
    ids=["disjoint", "with copies"],
)
def test_both_chances_against_the_loop_over_pairs(bits_FR, experts):
    found = measure_coactivation(packed(bits_FR), R, torch.tensor(experts))
    within, between = pair_by_pair(bits_FR, experts)
    assert found == pytest.approx((within, between))


def test_without_pairs_there_is_no_chance_and_without_activity_none_fires(bits_FR):
    assert measure_coactivation(packed(bits_FR), R, torch.tensor([[0, 1, 2]]))[1] is None
    assert measure_coactivation(packed(bits_FR), R, torch.tensor([[0], [1]]))[0] is None
    silent = measure_coactivation(torch.zeros(F, 3, dtype=torch.uint8), R, torch.tensor([[0, 1], [2, 3]]))
    assert silent == (0.0, 0.0)


def test_share_of_a_layer():
    contribution_F = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert share_of(contribution_F, torch.tensor([1, 3])) == pytest.approx(0.6)
    assert share_of(contribution_F, torch.tensor([], dtype=torch.int64)) == 0.0
    assert share_of(torch.zeros(4), torch.tensor([1])) == 0.0


@pytest.mark.parametrize(
    ("method", "shape", "said"),
    [
        ("router_aware", MoEShape(4, 6, 2, 8), "always-on neurons by s_p"),
        ("router_aware", MoEShape(4, 5, 2, 8), "always-on and dropped neurons by s_p"),
        ("router_aware", MoEShape(4, 8, 2, 0), "no neuron is always on or dropped"),
        ("rank", MoEShape(4, 6, 2, 8), "always-on and dealt-out neurons by s_p"),
        ("rank", MoEShape(4, 8, 2, 0), "dealt-out neurons by s_p"),
        ("router_aware", MoEShape(4, 6, 2, 8, "global_pool"), "always-on and pooled neurons by s_p"),
        ("rank", MoEShape(4, 6, 2, 0, "global_pool"), "pooled neurons by s_p"),
    ],
)
def test_nothing_is_said_to_decide_that_did_not(method, shape, said):
    cluster = ClusterConfig(method=method)
    score = "s_p" if cluster.reads_score(shape, 32) else None
    assert describe(cluster, shape, 32, score) == f"experts by {method}; {said}"
