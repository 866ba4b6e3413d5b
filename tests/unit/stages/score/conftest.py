from collections.abc import Callable

import pytest
import torch
from neuron_statistics import make_statistics as draw_statistics

from stages.artifacts.carve import NeuronStatistics

L, F, TOKENS, SAMPLES = 2, 7, 40, 5
GRADIENTS = ("sum_taylor", "grad_norm_gate", "grad_norm_up", "grad_norm_down")


@pytest.fixture
def make_statistics() -> Callable[..., NeuronStatistics]:
    """Make random positive sums; `gradient=False` gives the statistics of a forward-only scan."""

    def make(*, gradient: bool = True) -> NeuronStatistics:
        changes = {} if gradient else {name: torch.zeros(L, F, dtype=torch.float64) for name in GRADIENTS}
        return draw_statistics(
            L,
            F,
            seed=6,
            tokens=TOKENS,
            samples=SAMPLES,
            samples_with_gradient=SAMPLES if gradient else 0,
            active_count=torch.tensor([[0, 3, 9, 12, 1, 30, 0], [5, 4, 3, 2, 1, 40, 8]]),
            **changes,
        )

    return make
