import pytest
import torch
from scipy.optimize import linear_sum_assignment

from stages.calibration.balanced import assign_balanced


def best_total(affinity_UE, sizes_E):
    """Optimal total affinity, from a solver of the full U × U assignment problem."""
    slots_US = affinity_UE.double().numpy().repeat(sizes_E.numpy(), axis=1)
    rows, columns = linear_sum_assignment(slots_US, maximize=True)
    return slots_US[rows, columns].sum()


def total_of(affinity_UE, labels_U):
    return float(affinity_UE.double()[torch.arange(len(labels_U)), labels_U].sum())


def cosines(neurons, experts, *, clustered, seed):
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(neurons, 9, generator=generator)
    if clustered:
        points += 2 * torch.randn(4, 9, generator=generator)[torch.randint(4, (neurons,), generator=generator)]
    points = torch.nn.functional.normalize(points, dim=1)
    return points @ points[:experts].T


@pytest.mark.parametrize(("neurons", "experts"), [(13, 4), (96, 8), (300, 7), (2048, 16), (1, 1), (9, 1)])
@pytest.mark.parametrize("clustered", [True, False])
def test_the_total_is_the_optimum(neurons, experts, clustered):
    affinity_UE = cosines(neurons, experts, clustered=clustered, seed=neurons)
    sizes_E = torch.full((experts,), neurons // experts)
    sizes_E[: neurons % experts] += 1
    labels_U = assign_balanced(affinity_UE, sizes_E)
    assert torch.equal(labels_U.bincount(minlength=experts), sizes_E)
    assert total_of(affinity_UE, labels_U) == pytest.approx(best_total(affinity_UE, sizes_E), rel=1e-6)


def test_sizes_may_differ_and_be_zero():
    affinity_UE = cosines(50, 6, clustered=True, seed=1)
    sizes_E = torch.tensor([20, 0, 1, 9, 0, 20])
    labels_U = assign_balanced(affinity_UE, sizes_E)
    assert torch.equal(labels_U.bincount(minlength=6), sizes_E)
    assert total_of(affinity_UE, labels_U) == pytest.approx(best_total(affinity_UE, sizes_E), abs=1e-6)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_the_scale_of_affinities_does_not_matter(scale):
    affinity_UE = cosines(40, 5, clustered=False, seed=2)
    sizes_E = torch.full((5,), 8)
    labels_U = assign_balanced(affinity_UE * scale, sizes_E)
    assert total_of(affinity_UE, labels_U) == pytest.approx(best_total(affinity_UE, sizes_E), abs=1e-6)


def test_neurons_that_all_want_the_same_expert_still_fill_all():
    affinity_UE = torch.tensor([1.0, 0.5, 0.0]).expand(600, 3)
    assert assign_balanced(affinity_UE, torch.tensor([200, 150, 250])).bincount().tolist() == [200, 150, 250]


def test_many_neurons_without_preference():
    """Dead neurons have zero rows; they are moved in bulk and do not displace the other neurons."""
    affinity_UE = torch.cat([torch.eye(4).repeat(10, 1), torch.zeros(3000, 4)])
    labels_U = assign_balanced(affinity_UE, torch.full((4,), 760))
    assert labels_U.bincount().tolist() == [760] * 4
    assert torch.equal(labels_U[:40], torch.arange(4).repeat(10))
