"""Maps of layers: which are drawn, where neurons are placed, and the picture."""

from io import BytesIO

import matplotlib.image
import numpy as np
import pytest
import torch

from stages.cluster.config import ClusterConfig
from stages.cluster.layer import ALWAYS_ON, DROPPED
from stages.cluster.picture import NeuronMap, place_neurons, plot_neuron_map, principal_points
from stages.cluster.stage import layers_to_draw


@pytest.mark.parametrize(
    ("wanted", "layers", "drawn"),
    [([], 9, [4]), ([], 2, [1]), ([], 1, [0]), ([-1, 3, 3], 9, [3, 8]), ([-9, 8], 9, [0, 8])],
)
def test_layers_count_from_either_end(wanted, layers, drawn):
    assert layers_to_draw(ClusterConfig(map_layers=wanted), layers) == drawn


@pytest.mark.parametrize(("wanted", "drawn"), [([], [5]), ([0, -2, 8], [7])])
def test_layers_that_stay_dense_are_not_drawn(wanted, drawn):
    assert layers_to_draw(ClusterConfig(map_layers=wanted), 9, (0, 4, 8)) == drawn


def test_without_maps_no_layer_is_drawn():
    assert layers_to_draw(ClusterConfig(map="none", map_layers=[77]), 4) == []


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


def neurons_of(home_U, experts, *, s_p=None, frequency=None):
    count = len(home_U)
    generator = torch.Generator().manual_seed(0)
    return NeuronMap(
        coordinates_U2=torch.randn(count, 2, generator=generator),
        home_U=torch.tensor(home_U),
        score_U=torch.randn(count, generator=generator) if s_p is None else s_p,
        score="s_p",
        frequency_U=torch.rand(count, generator=generator) if frequency is None else frequency,
        experts=experts,
    )


def colours_in(png, left, right):
    """24-bit colours between two positions, given as shares of the image's width."""
    pixels = (matplotlib.image.imread(BytesIO(png))[:, :, :3] * 255).round().astype(int)
    width = pixels.shape[1]
    part = pixels[:, int(left * width) : int(right * width)].reshape(-1, 3)
    return set(np.unique(part @ [65536, 256, 1]).tolist())


def test_the_panel_of_experts_shows_every_role_and_each_expert_in_its_colour():
    png = plot_neuron_map(neurons_of([ALWAYS_ON, DROPPED, 0, 1, 2, 0, 1, 2, DROPPED], 3), title="Layer 0")
    first_panel = colours_in(png, 0.0, 0.28)
    assert {0x666666, 0xDDDDDD, 0x1F77B4, 0xAEC7E8, 0xFF7F0E} <= first_panel
    assert 0xFF7F0E not in colours_in(png, 0.36, 1.0)


def test_the_same_input_gives_the_same_bytes():
    neurons = neurons_of([0, 1, 2, 3] * 5, 4)
    first = plot_neuron_map(neurons, title="Layer 0")
    assert first == plot_neuron_map(neurons, title="Layer 0")
    assert b"Software" not in first


@pytest.mark.parametrize(
    "neurons",
    [
        neurons_of([0] * 6, 1, s_p=torch.zeros(6), frequency=torch.zeros(6)),
        neurons_of([0] * 6, 1, s_p=torch.ones(6), frequency=torch.full((6,), 0.2)),
        neurons_of([0, 1, 2, 3], 4, frequency=torch.tensor([0.0, 0.0, 0.0, 1.0])),
        neurons_of(list(range(100)), 100),
        neurons_of([ALWAYS_ON, DROPPED], 3),
    ],
    ids=["never active", "no spread", "one active", "many experts", "empty experts"],
)
def test_degenerate_layers_are_drawn_too(neurons):
    png = plot_neuron_map(neurons, title="Layer 0")
    assert matplotlib.image.imread(BytesIO(png)).shape == (748, 2200, 4)
