import numpy as np
import pytest
import torch

from models.shape import Shape
from stages.cluster.layer import partition_layer
from stages.cluster.neuron_map import ALWAYS_ON, DROPPED
from stages.cluster.views import coactivation_features

F, R = 27, 90


def partition(shape, planted, *, method="balanced_kmeans", seed=0):
    statistics = planted.statistics
    measure_F, scores_F = statistics.sum_abs[0].float(), statistics.sum_sq[0].float()
    return partition_layer(
        measure_F,
        scores_F,
        lambda: coactivation_features(statistics.active_bits[0], R, dims=8, rng=np.random.default_rng(seed)),
        shape,
        method=method,
        iterations=20,
        rng=np.random.default_rng(seed),
    )


@pytest.fixture
def planted(plant):
    return plant(width=F, groups=4, tokens=R)


@pytest.mark.parametrize("method", ["balanced_kmeans", "rank", "random", "contiguous"])
@pytest.mark.parametrize(
    "shape",
    [
        Shape(experts=4, n=6, top_k=2, always_on=3),  # E·N = F − S
        Shape(experts=4, n=5, top_k=2, always_on=3),  # below
        Shape(experts=4, n=8, top_k=2, always_on=3),  # above
        Shape(experts=50, n=24, top_k=2, always_on=3),  # every unit in every expert
        Shape(experts=40, n=7, top_k=2, always_on=0),  # more experts than units
        Shape(experts=1, n=20, top_k=1, always_on=7),
        Shape(experts=26, n=1, top_k=3, always_on=1),
    ],
    ids=["equal", "below", "above", "full", "many", "one", "single"],
)
def test_every_method_obeys_the_shape(method, shape, planted):
    found = partition(shape, planted, method=method)
    roles, labels_U, units_EN = found.roles, found.labels_U, found.units_EN
    routable = F - shape.always_on
    assert units_EN.shape == (shape.experts, shape.n)
    assert (units_EN.diff(dim=1) > 0).all()
    assert torch.equal(units_EN.unique(), roles.routed_U)
    assert len(roles.always_on_S) == shape.always_on
    assert len(roles.dropped_X) == max(0, routable - shape.experts * shape.n)
    assert torch.cat(roles).sort().values.tolist() == list(range(F))
    home_sizes_E = labels_U.bincount(minlength=shape.experts)
    assert home_sizes_E.max() - home_sizes_E.min() <= 1
    assert all(unit in units_EN[home] for unit, home in zip(roles.routed_U, labels_U, strict=True))


def test_units_that_fire_together_share_an_expert(plant):
    planted = plant(width=F, groups=3, tokens=R)
    result = partition(Shape(experts=3, n=9, top_k=1, always_on=0), planted)
    groups = [planted.group_LF[0, units_N].unique() for units_N in result.units_EN]
    assert sorted(torch.cat(groups).tolist()) == [0, 1, 2]


def test_copies_go_where_they_fire_together(plant):
    planted = plant(width=F, groups=3, tokens=R)
    result = partition(Shape(experts=9, n=8, top_k=2, always_on=0), planted)
    assert all(len(planted.group_LF[0, units_N].unique()) == 1 for units_N in result.units_EN)


def test_dead_units_are_placed_like_all_others(plant):
    planted = plant(width=F, groups=3, tokens=R, dead=7)
    result = partition(Shape(experts=3, n=9, top_k=1, always_on=0), planted)
    assert sorted(result.units_EN.flatten().tolist()) == list(range(F))
    assert all(len(planted.group_LF[0, units_N[units_N >= 7]].unique()) == 1 for units_N in result.units_EN)


def test_homes_name_the_role_of_every_unit(planted):
    result = partition(Shape(experts=4, n=5, top_k=2, always_on=3), planted)
    roles, labels_U = result.roles, result.labels_U
    assert (result.home_F[roles.always_on_S] == ALWAYS_ON).all()
    assert (result.home_F[roles.dropped_X] == DROPPED).all()
    assert torch.equal(result.home_F[roles.routed_U], labels_U)


def test_the_same_seed_gives_the_same_partition(planted):
    shape = Shape(experts=4, n=8, top_k=2, always_on=3)
    assert torch.equal(partition(shape, planted).units_EN, partition(shape, planted).units_EN)
    random = partition(shape, planted, method="random").units_EN
    assert not torch.equal(random, partition(shape, planted, method="random", seed=1).units_EN)
