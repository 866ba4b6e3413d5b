"""Some of many tokens, spread evenly over the text."""

import torch
from jaxtyping import Int
from torch import Tensor


def spread_evenly(count: int, wanted: int) -> Int[Tensor, "t"]:
    """Indices of `wanted` of `count`, first and last among them; at least one, all where more are wanted."""
    return torch.linspace(0, count - 1, max(1, min(count, wanted))).round().long()
