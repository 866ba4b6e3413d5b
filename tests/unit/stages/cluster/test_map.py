import numpy as np
import pytest
import torch

from stages.cluster.picture import place_neurons, principal_points

METHODS = ["umap", "tsne"]


def two_groups(neurons):
    generator = torch.Generator().manual_seed(0)
    return torch.eye(2, 5).repeat_interleave(neurons // 2, dim=0) + 0.1 * torch.randn(neurons, 5, generator=generator)


@pytest.mark.parametrize("method", METHODS)
def test_like_neurons_lie_close_and_the_stream_decides(method):
    features_UC = two_groups(60)
    places_U2 = place_neurons(features_UC, method, neighbors=10, rng=np.random.default_rng(3))
    assert places_U2.shape == (60, 2)
    nearest_U = torch.cdist(places_U2, places_U2).fill_diagonal_(torch.inf).argmin(1)
    assert torch.equal(nearest_U < 30, torch.arange(60) < 30)
    assert torch.equal(places_U2, place_neurons(features_UC, method, neighbors=10, rng=np.random.default_rng(3)))
    assert not torch.equal(places_U2, place_neurons(features_UC, method, neighbors=10, rng=np.random.default_rng(4)))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(4, 3), (5, 64), (12, 1)])
def test_few_or_narrow_neurons_are_placed_too(method, shape):
    features_UC = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    places_U2 = place_neurons(features_UC, method, neighbors=15, rng=np.random.default_rng(0))
    assert places_U2.isfinite().all()
    assert places_U2.shape == (shape[0], 2)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dead", [9, 30])
def test_dead_neurons_are_placed_too(method, dead):
    features_UC = two_groups(30)
    features_UC[:dead] = 0
    assert place_neurons(features_UC, method, neighbors=5, rng=np.random.default_rng(0)).isfinite().all()


def test_the_threads_of_the_process_stay_as_they_were():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    place_neurons(two_groups(20), "umap", neighbors=5, rng=np.random.default_rng(0))
    assert torch.get_num_threads() == 1
    torch.set_num_threads(threads)


def test_principal_points_keep_angles_and_lose_lengths():
    features_UC = two_groups(20)
    lengths_U1 = torch.logspace(-2, 2, 20)[:, None]
    points_UP = torch.from_numpy(principal_points(features_UC * lengths_U1))
    directions_UC = torch.nn.functional.normalize(features_UC, dim=1)
    torch.testing.assert_close(torch.cdist(points_UP, points_UP), torch.cdist(directions_UC, directions_UC))
    assert (points_UP.std(0).diff() <= 0).all()
    assert principal_points(torch.randn(70, 60)).shape == (70, 50)
