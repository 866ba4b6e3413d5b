"""A tensor rounded into a number format, and what that cost."""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from models.dump.quantise.hifloat8 import round_to_hifloat8
from models.dump.quantise.microscaling import E2M1, E4M3, round_to_blocks
from models.dump.records import RoundingError

_ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "hifp8": round_to_hifloat8,
    "mxfp8": lambda values: round_to_blocks(values, E4M3),
    "mxfp4": lambda values: round_to_blocks(values, E2M1),
    "bf16": lambda values: values.to(torch.bfloat16),
    "fp16": lambda values: values.to(torch.float16),
}


@torch.no_grad()
def round_into(values: Float[Tensor, "..."], quant_type: str) -> tuple[Float[Tensor, "..."], RoundingError]:
    """The values as the format holds them, and their error.

    Args:
        values: at least one axis for the block formats, whose blocks run along the last.
        quant_type: hifp8, mxfp8, mxfp4, bf16 or fp16.
    Returns:
        Rounded values, float32 where torch has no such format; their error against `values`.
    """
    rounded = _ROUNDINGS[quant_type](values)
    exact = values.double()
    difference = rounded.double() - exact
    signal, noise = float(torch.linalg.vector_norm(exact)), float(torch.linalg.vector_norm(difference))
    relative = noise / signal if signal else (0.0 if noise == 0 else math.inf)
    decibels = -20 * math.log10(relative) if 0 < relative < math.inf else None
    largest = float(difference.abs().max()) if values.numel() else 0.0
    return rounded.contiguous(), RoundingError(relative, decibels, largest)
