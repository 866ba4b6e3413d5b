import pytest
import torch

from stages.cluster.methods import fill_experts, group_sizes


@pytest.mark.parametrize(
    ("neurons", "groups", "sizes"), [(10, 4, [3, 3, 2, 2]), (12, 3, [4, 4, 4]), (2, 5, [1, 1, 0, 0, 0])]
)
def test_sizes_differ_by_one_at_most(neurons, groups, sizes):
    assert group_sizes(neurons, groups).tolist() == sizes


def test_full_groups_stay_as_they_are():
    labels_U = torch.tensor([1, 0, 2, 1, 0, 2])
    affinity_UE = torch.rand(6, 3, generator=torch.Generator().manual_seed(0))
    assert fill_experts(affinity_UE, labels_U, 2).tolist() == [[1, 4], [0, 3], [2, 5]]


def test_room_goes_to_the_neurons_that_fit_best():
    labels_U = torch.tensor([0, 1, 2, 0, 1])
    affinity_UE = torch.tensor([[0.1, 0.9, 0.0], [0.5, 0.2, 0.3], [0.7, 0.0, 0.0], [0.0, 0.8, 0.1], [0.6, 0.0, 0.3]])
    # An expert's own neurons come first, even with low affinity; then experts 0, 1 and 2 add 2, 0 and (1, 4).
    assert fill_experts(affinity_UE, labels_U, 3).tolist() == [[0, 2, 3], [0, 1, 4], [1, 2, 4]]


def test_heavy_replication_uses_every_neuron_and_none_twice_in_an_expert():
    neurons, experts, size = 41, 100, 11
    labels_U = torch.arange(neurons)
    affinity_UE = torch.randn(neurons, experts, generator=torch.Generator().manual_seed(0))
    neurons_EN = fill_experts(affinity_UE, labels_U, size)
    assert neurons_EN.shape == (experts, size)
    assert (neurons_EN.diff(dim=1) > 0).all()
    assert neurons_EN.unique().tolist() == list(range(neurons))
    assert all(neuron in neurons_EN[neuron] for neuron in range(neurons))
