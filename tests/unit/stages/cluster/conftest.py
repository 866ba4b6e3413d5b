from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from neuron_statistics import make_statistics
from torch import Tensor

from stages.artifacts.carve import NeuronStatistics


class Planted(NamedTuple):
    """Statistics in which the neurons of a group fire on the same tokens, and each neuron's group."""

    statistics: NeuronStatistics
    group_LF: Tensor


@pytest.fixture
def plant() -> Callable[..., Planted]:
    """Make neurons of `groups` topics, shuffled: each fires on most tokens of its topic and on few others."""

    def make(*, layers: int = 2, width: int = 24, groups: int = 3, tokens: int = 90, dead: int = 0) -> Planted:
        rng = np.random.default_rng(5)
        group_LF = np.stack([rng.permutation(width) % groups for _ in range(layers)])
        topic_R = rng.permutation(tokens) % groups
        chance_LFR = np.where(group_LF[..., None] == topic_R, 0.9, 0.05)
        bits_LFR = rng.random(chance_LFR.shape) < chance_LFR
        bits_LFR[:, :dead] = False

        statistics = make_statistics(
            layers,
            width,
            seed=5,
            tokens=tokens,
            active_count=torch.from_numpy(bits_LFR.sum(2)),
            active_bits=torch.from_numpy(np.packbits(bits_LFR, axis=2)),
            reservoir_tokens=tokens,
        )
        return Planted(statistics, torch.from_numpy(group_LF))

    return make
