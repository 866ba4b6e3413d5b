"""Some of many tokens, spread evenly over the text."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor


def spread_evenly(count: int, wanted: int) -> Int[Tensor, "t"]:
    """Indices of `wanted` of `count`, first and last among them; at least one, all where more are wanted."""
    return torch.linspace(0, count - 1, max(1, min(count, wanted))).round().long()


def pick_tokens(lengths: Sequence[int], wanted: int) -> list[Tensor]:
    """Of every batch the indices of as large a part as keeps all together at about `wanted`; one of each at least."""
    share = min(1.0, wanted / max(1, sum(lengths)))
    return [spread_evenly(length, round(length * share)) for length in lengths]


def take_tokens(batches: Sequence[Tensor], picks: Sequence[Tensor]) -> list[Tensor]:
    """Those tokens of every batch."""
    return [batch_TD[pick_t] for batch_TD, pick_t in zip(batches, picks, strict=True)]
