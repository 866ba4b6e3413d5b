"""Random tensors of a seed."""

import torch


def draw(*shape, seed=0):
    """Draw standard normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
