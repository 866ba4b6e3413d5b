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
            assert float(affinity_UE.double()[torch.arange(len(labels_U)), labels_U].sum()) == optimum
        assert torch.equal(assign_balanced(affinity_UE, sizes_E), assign_balanced(affinity_UE.clone(), sizes_E))


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


@pytest.mark.parametrize("decades", [0, 3])
def test_planted_groups_are_found_whatever_the_length_of_the_features(decades):
    features_UC, group_U = planted()
    lengths_U1 = torch.logspace(-decades, decades, NEURONS)[:, None]
    labels_U = fit_balanced_kmeans(features_UC * lengths_U1, torch.full((E,), 15), rng=np.random.default_rng(0))
    assert torch.equal(labels_U[:, None] == labels_U, group_U[:, None] == group_U)  # the same groups


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


def test_first_centroids_lie_apart():
    directions_UC = torch.eye(4, C).repeat_interleave(50, dim=0)
    for seed in range(5):
        centroids_EC = seed_centroids(directions_UC, 4, np.random.default_rng(seed))
        assert sorted(centroids_EC.argmax(1).tolist()) == [0, 1, 2, 3]
