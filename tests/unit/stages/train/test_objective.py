import pytest
import torch

from stages.train.objective import RunningMetrics

LOADS = [torch.tensor([[3, 1, 0], [0, 2, 2]]), torch.tensor([[1, 3, 0], [4, 0, 0]])]


def filled(*, pooled):
    tally = RunningMetrics(pooled)
    for load in LOADS:
        tally.add(load, language_model=torch.tensor(6.0), items=torch.tensor(3), tokens=torch.tensor(4), passes=1.0,
                  router_entropy=torch.tensor(0.5))  # fmt: skip
    return tally


def test_figures_are_means_over_what_was_counted():
    found = filled(pooled=False).collect()
    assert found == {
        "language_model": 2.0,
        "router_entropy": 0.5,
        "load_max_over_mean": pytest.approx(4 / (8 / 3)),
        "load_max_over_mean_average": pytest.approx(1.5),
        "dead_experts": 1,
        "tokens": 8,
    }


def test_layers_of_a_pool_load_the_same_experts():
    found = filled(pooled=True).collect()
    assert found["load_max_over_mean"] == pytest.approx(8 / (16 / 3))
    assert found["dead_experts"] == 0


def test_what_was_collected_is_not_counted_again():
    tally = filled(pooled=False)
    tally.collect()
    assert tally.collect() == {}
