from io import BytesIO
from itertools import combinations

import matplotlib.image
import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb

from stages.cluster.layer import ALWAYS_ON, DROPPED
from stages.cluster.picture import COLOURS, NeuronMap, distinct_colours, plot_neuron_map


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
    assert {0x666666, 0xDDDDDD, 0x1F7AB8, 0xFF00FF, 0x00C200} <= first_panel
    assert 0x1F7AB8 not in colours_in(png, 0.36, 1.0)


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


def test_the_first_colours_all_differ_clearly():
    for first, second in combinations(map(to_rgb, COLOURS), 2):
        assert max(abs(a - b) for a, b in zip(first, second, strict=True)) > 0.15


def test_more_colours_than_there_are_repeat():
    assert distinct_colours(3) == list(COLOURS[:3])
    many = distinct_colours(100)
    assert len(many) == 100
    assert many[32:64] == list(COLOURS)
