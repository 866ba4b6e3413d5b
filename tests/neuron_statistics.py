"""The statistics of a scan, drawn from a seed."""

import torch

from stages.artifacts.carve import NeuronStatistics

SUMS = ("sum_abs", "sum_sq", "max_abs", "sum_taylor", "grad_norm_gate", "grad_norm_up", "grad_norm_down")


def make_statistics(layers, width, seed=0, *, tokens=40, **changes):
    """Draw positive sums; `changes` are other values of fields."""
    generator, size = torch.Generator().manual_seed(seed), (layers, width)
    facts = {
        "tokens": tokens,
        "samples": 6,
        "samples_with_gradient": 6,
        "mean_loss": 2.25,
        **{name: torch.rand(size, generator=generator, dtype=torch.float64) + 0.1 for name in SUMS},
        "active_count": torch.randint(tokens + 1, size, generator=generator),
        "weight_norm_down": torch.rand(size, generator=generator) + 0.1,
        "active_bits": torch.randint(256, (*size, 1), generator=generator, dtype=torch.uint8),
        "reservoir_tokens": 8,
    }
    return NeuronStatistics(**facts | changes)
