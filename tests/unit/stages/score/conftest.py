from collections.abc import Callable

import pytest
import torch

from stages.artifacts.carve import NeuronStatistics

L, F, TOKENS, SAMPLES = 2, 7, 40, 5


@pytest.fixture
def make_statistics() -> Callable[..., NeuronStatistics]:
    """Make random positive sums; `gradient=False` gives the statistics of a forward-only scan."""

    def make(*, gradient: bool = True) -> NeuronStatistics:
        generator = torch.Generator().manual_seed(5)

        def sums() -> torch.Tensor:
            return torch.rand(L, F, generator=generator, dtype=torch.float64) + 0.1

        def norms() -> torch.Tensor:
            return sums() if gradient else torch.zeros(L, F, dtype=torch.float64)

        return NeuronStatistics(
            tokens=TOKENS,
            samples=SAMPLES,
            samples_with_gradient=SAMPLES if gradient else 0,
            mean_loss=2.5,
            sum_abs=sums(),
            sum_sq=sums(),
            max_abs=sums(),
            active_count=torch.tensor([[0, 3, 9, 12, 1, 30, 0], [5, 4, 3, 2, 1, 40, 8]]),
            sum_taylor=norms(),
            grad_norm_gate=norms(),
            grad_norm_up=norms(),
            grad_norm_down=norms(),
            weight_norm_down=sums().float(),
            active_bits=torch.zeros(L, F, 1, dtype=torch.uint8),
            reservoir_tokens=8,
        )

    return make
