import numpy as np
import pytest
import torch

from models.config import MoEShape
from stages.cluster.layer import ALWAYS_ON, DROPPED, partition_layer, split_neurons
from stages.cluster.methods import project_on_top_directions, unpack_bits

F, R = 27, 90


def partition(shape, planted, *, method="balanced_kmeans"):
    statistics = planted.statistics
    return partition_layer(
        statistics.sum_abs[0].float(),
        lambda: project_on_top_directions(unpack_bits(statistics.active_bits[0], R), 8, np.random.default_rng(0)),
        shape,
        method=method,
        rng=np.random.default_rng(0),
    )


@pytest.fixture
def planted(plant):
    return plant(width=F, groups=4, tokens=R)


@pytest.mark.parametrize("method", ["balanced_kmeans", "rank", "random", "contiguous"])
@pytest.mark.parametrize(
    "shape",
    [
        MoEShape(experts=4, n=6, top_k=2, always_on=3),  # E·N = F − S
        MoEShape(experts=4, n=5, top_k=2, always_on=3),  # E·N < F − S
        MoEShape(experts=4, n=8, top_k=2, always_on=3),  # E·N > F − S
        MoEShape(experts=50, n=24, top_k=2, always_on=3),  # every neuron in every expert
        MoEShape(experts=40, n=7, top_k=2, always_on=0),  # more experts than neurons
        MoEShape(experts=1, n=20, top_k=1, always_on=7),
        MoEShape(experts=26, n=1, top_k=3, always_on=1),
    ],
    ids=["equal", "below", "above", "full", "many", "one", "single"],
)
def test_every_method_obeys_the_shape(method, shape, planted):
    found = partition(shape, planted, method=method)
    labels_U, neurons_EN = found.labels_U, found.neurons_EN
    routable = F - shape.always_on
    assert neurons_EN.shape == (shape.experts, shape.n)
    assert (neurons_EN.diff(dim=1) > 0).all()
    assert torch.equal(neurons_EN.unique(), found.routed_U)
    assert len(found.always_on_S) == shape.always_on
    assert len(found.dropped_X) == max(0, routable - shape.experts * shape.n)
    every = torch.cat([found.always_on_S, found.routed_U, found.dropped_X])
    assert every.sort().values.tolist() == list(range(F))
    home_sizes_E = labels_U.bincount(minlength=shape.experts)
    assert home_sizes_E.max() - home_sizes_E.min() <= 1
    assert all(neuron in neurons_EN[home] for neuron, home in zip(found.routed_U, labels_U, strict=True))


def test_neurons_that_fire_together_share_an_expert(plant):
    planted = plant(width=F, groups=3, tokens=R)
    result = partition(MoEShape(experts=3, n=9, top_k=1, always_on=0), planted)
    groups = [planted.group_LF[0, neurons_N].unique() for neurons_N in result.neurons_EN]
    assert sorted(torch.cat(groups).tolist()) == [0, 1, 2]


def test_copies_go_where_they_fire_together(plant):
    planted = plant(width=F, groups=3, tokens=R)
    result = partition(MoEShape(experts=9, n=8, top_k=2, always_on=0), planted)
    assert all(len(planted.group_LF[0, neurons_N].unique()) == 1 for neurons_N in result.neurons_EN)


def test_homes_name_the_role_of_every_neuron(planted):
    result = partition(MoEShape(experts=4, n=5, top_k=2, always_on=3), planted)
    assert (result.home_F[result.always_on_S] == ALWAYS_ON).all()
    assert (result.home_F[result.dropped_X] == DROPPED).all()
    assert torch.equal(result.home_F[result.routed_U], result.labels_U)


@pytest.mark.parametrize(
    ("scores", "always_on", "slots", "roles"),
    [
        ([6.0, 1.0, 4.0, 2.0, 5.0, 3.0], 2, 4, [[0, 4], [1, 2, 3, 5], []]),
        ([6.0, 1.0, 4.0, 2.0, 5.0, 3.0], 2, 400, [[0, 4], [1, 2, 3, 5], []]),
        ([6.0, 1.0, 4.0, 2.0, 5.0, 3.0], 2, 3, [[0, 4], [2, 3, 5], [1]]),
        ([6.0, 1.0, 4.0, 2.0, 5.0, 3.0], 0, 2, [[], [0, 4], [1, 2, 3, 5]]),
        ([0.0] * 5, 1, 3, [[0], [1, 2, 3], [4]]),  # ties go to the lower index
    ],
)
def test_the_highest_stay_on_and_the_lowest_are_dropped(scores, always_on, slots, roles):
    found = split_neurons(torch.tensor(scores), always_on=always_on, slots=slots)
    assert [neurons.tolist() for neurons in found] == roles
