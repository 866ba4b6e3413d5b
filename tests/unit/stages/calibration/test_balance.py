import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch.nn.functional import normalize

from instruments.errors import NumericsError
from stages.calibration import transport
from stages.calibration.balanced import assign_balanced, fit_balanced_kmeans, mean_directions, seed_centroids


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


def draw_problem(kind, rng):
    """Affinities of few neurons to few experts, and sizes, some of which are zero."""
    neurons, experts = int(rng.integers(1, 120)), int(rng.integers(1, 12))
    affinity_UE = torch.from_numpy(rng.standard_normal((neurons, experts))).float()
    match kind:
        case "ties":
            affinity_UE = affinity_UE.round()
        case "dead neurons":
            affinity_UE[rng.random(neurons) < 0.5] = 0
        case "equal neurons":
            affinity_UE = affinity_UE[rng.integers(neurons, size=neurons)]
        case "energies":  # of many magnitudes, most are zero
            affinity_UE = (4 * affinity_UE).exp() * torch.from_numpy(rng.random(affinity_UE.shape) < 0.3)
        case "forced":  # neurons that have to be in one expert
            affinity_UE[torch.arange(neurons), torch.from_numpy(rng.integers(experts, size=neurons))] = 1e6
    ends = np.sort(rng.integers(0, neurons + 1, experts - 1))
    return affinity_UE, torch.from_numpy(np.diff(ends, prepend=0, append=neurons))


@pytest.mark.parametrize("kind", ["plain", "ties", "dead neurons", "equal neurons", "energies", "forced"])
def test_the_total_is_the_optimum_from_any_prices(kind):
    rng = np.random.default_rng(0)
    for _ in range(60):
        affinity_UE, sizes_E = draw_problem(kind, rng)
        optimum = pytest.approx(best_total(affinity_UE, sizes_E), abs=1e-12 * float(affinity_UE.abs().sum()))
        for prices_E in (None, 3 * torch.from_numpy(rng.standard_normal(len(sizes_E)))):
            labels_U = assign_balanced(affinity_UE, sizes_E, prices_E)
            assert torch.equal(labels_U.bincount(minlength=len(sizes_E)), sizes_E)
            assert total_of(affinity_UE, labels_U) == optimum
        assert torch.equal(assign_balanced(affinity_UE, sizes_E), assign_balanced(affinity_UE.clone(), sizes_E))


def test_final_prices_prove_the_optimum():
    """Duality of linear programming: no assignment exceeds Σ max(affinity − price) + Σ size·price."""
    affinity_UE, sizes_E = cosines(300, 6, clustered=True, seed=7), torch.full((6,), 50)
    prices_E = torch.zeros(6, dtype=torch.float64)
    total = total_of(affinity_UE, assign_balanced(affinity_UE, sizes_E, prices_E))
    bound = float((affinity_UE.double() - prices_E).amax(1).sum() + (sizes_E * prices_E).sum())
    assert total == pytest.approx(bound, rel=1e-12)


def test_affinities_that_are_not_finite_are_refused():
    with pytest.raises(NumericsError, match="affinities"):
        assign_balanced(torch.tensor([[1.0, torch.nan]]), torch.tensor([1, 0]))


def test_the_solver_works_where_its_code_cannot_be_cached():
    scope = {}
    exec("def double(x): return 2 * x", scope)  # no file, and so no place for a cache
    assert transport._compiled(scope["double"])(4) == 8


NEURONS, E, C = 45, 3, 7


def planted(seed=0):
    generator = torch.Generator().manual_seed(seed)
    group_U = torch.randperm(NEURONS, generator=generator) % E
    centres_EC = torch.randn(E, C, generator=generator)
    return centres_EC[group_U] + 0.2 * torch.randn(NEURONS, C, generator=generator), group_U


def same_partition(first_U, second_U):
    return torch.equal(first_U[:, None] == first_U, second_U[:, None] == second_U)


@pytest.mark.parametrize("decades", [0, 3])
def test_planted_groups_are_found_whatever_the_length_of_the_features(decades):
    features_UC, group_U = planted()
    lengths_U1 = torch.logspace(-decades, decades, NEURONS)[:, None]
    labels_U = fit_balanced_kmeans(features_UC * lengths_U1, torch.full((E,), 15), rng=np.random.default_rng(0))
    assert same_partition(labels_U, group_U)


def test_more_rounds_never_fit_worse():
    features_UC = torch.randn(200, C, generator=torch.Generator().manual_seed(1))
    directions_UC = normalize(features_UC, dim=1)
    totals = []
    for iterations in (1, 2, 4, 30):
        labels_U = fit_balanced_kmeans(
            features_UC, torch.full((8,), 25), iterations=iterations, rng=np.random.default_rng(0)
        )
        centroids_EC = mean_directions(directions_UC, labels_U, 8)
        totals.append(float((directions_UC * centroids_EC[labels_U]).sum()))
    assert totals == sorted(totals)
    assert totals[-1] > totals[0]


def test_sizes_are_kept_and_draws_are_seeded():
    features_UC, _group = planted()
    sizes_E = torch.tensor([20, 5, 20])
    first_U = fit_balanced_kmeans(features_UC, sizes_E, iterations=5, rng=np.random.default_rng(1))
    assert torch.equal(first_U.bincount(), sizes_E)
    assert torch.equal(first_U, fit_balanced_kmeans(features_UC, sizes_E, iterations=5, rng=np.random.default_rng(1)))


@pytest.mark.parametrize("dead", [11, NEURONS])
def test_neurons_without_direction_fill_what_is_left(dead):
    features_UC, group_U = planted()
    features_UC[:dead] = 0
    labels_U = fit_balanced_kmeans(features_UC, torch.full((E,), 15), iterations=20, rng=np.random.default_rng(0))
    assert labels_U.bincount().tolist() == [15, 15, 15]
    assert same_partition(labels_U[dead:], group_U[dead:])


def test_an_empty_cluster_has_no_direction():
    directions_UC = normalize(torch.randn(4, C, generator=torch.Generator().manual_seed(0)), dim=1)
    centroids_EC = mean_directions(directions_UC, torch.tensor([0, 0, 2, 2]), 3)
    assert not centroids_EC[1].any()
    torch.testing.assert_close(centroids_EC[[0, 2]].norm(dim=1), torch.ones(2))


def test_first_centroids_lie_apart():
    directions_UC = torch.eye(4, C).repeat_interleave(50, dim=0)
    for seed in range(5):
        centroids_EC = seed_centroids(directions_UC, 4, np.random.default_rng(seed))
        assert sorted(centroids_EC.argmax(1).tolist()) == [0, 1, 2, 3]
