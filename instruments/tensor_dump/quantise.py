"""A tensor rounded into a number format, and what that cost."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float32, Int32
from torch import Tensor

from instruments.tensor_dump.records import RoundingError

LEAST, GREATEST = -22, 15
LARGEST = 2.0**GREATEST  # the next code, 1.5·2^15, is infinity's


def round_to_hifloat8(values: Float[Tensor, "..."]) -> Float32[Tensor, "..."]:
    """The nearest values of HiFloat8, ties away from zero.

    2^E has 3 mantissa bits up to |E| = 3, 2 up to 7, 1 up to 15, and none from 2^-16 down to 2^-22, the smallest
    magnitude. From 1.25·2^15 on it is infinite; below 2^-23 it is 0.

    Numerics: exact but for the rounding.
    """
    values = values.float()
    magnitude = values.abs()
    exponent = torch.frexp(magnitude).exponent - 1
    width = exponent.abs()
    bits = (width <= 15).int() + (width <= 7).int() + (width <= 3).int()
    bits = torch.where(exponent < -15, 0, bits)
    step = exponent.clamp(LEAST, GREATEST + 1) - bits
    rounded = torch.ldexp(torch.floor(torch.ldexp(magnitude, -step) + 0.5), step)
    rounded = torch.where(rounded > LARGEST, math.inf, rounded)
    # There is one zero, and it is positive.
    return torch.where(values.isnan(), values, torch.copysign(rounded, values) + 0.0)


BLOCK = 32
# E8M0: 2^-127 to 2^127; NaN is its only other value.
SCALE_MIN, SCALE_MAX = -127, 127


@dataclass(frozen=True)
class Element:
    """A sign, exponents from `least` to `greatest`, so many mantissa bits, subnormals, no infinity."""

    least: int
    greatest: int
    mantissa: int
    largest: float  # magnitude


E4M3 = Element(least=-6, greatest=8, mantissa=3, largest=448.0)
E2M1 = Element(least=0, greatest=2, mantissa=1, largest=6.0)


def round_to_blocks(values: Float[Tensor, "*axes K"], element: Element) -> Float32[Tensor, "*axes K"]:
    """The values that 32 neighbours of the last axis stand for after they were given one scale and rounded.

    The scale of a block is 2^(⌊log2(its largest magnitude)⌋ − the element's greatest exponent); elements are rounded to
    nearest, ties to even, and saturate. A block with a value that is not finite becomes NaN, as its scale does. The
    last block of an axis that is no multiple of 32 is filled up with zeros, which change nothing.

    Numerics: exact; every step is a power of two or a rounding that the format asks for.
    """
    width = values.shape[-1]
    padded = torch.nn.functional.pad(values.float(), (0, -width % BLOCK))
    blocks = padded.unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    scale = (_exponent(largest) - element.greatest).clamp(SCALE_MIN, SCALE_MAX)
    rounded = _scale(round_elements(_scale(blocks, -scale), element), scale)
    rounded = torch.where(largest.isfinite(), rounded, math.nan)
    return rounded.flatten(-2)[..., :width]


def round_elements(values: Float32[Tensor, "..."], element: Element) -> Float32[Tensor, "..."]:
    """Each value alone, to the element format: nearest, ties to even, saturating."""
    exponent = _exponent(values).clamp(min=element.least)
    step = exponent - element.mantissa
    rounded = _scale(_scale(values, -step).round(), step)  # torch rounds ties to even
    return rounded.clamp(-element.largest, element.largest)


def _exponent(values: Float32[Tensor, "..."]) -> Int32[Tensor, "..."]:
    """⌊log2|v|⌋, exactly; of 0 the least there is."""
    exponent = torch.frexp(values).exponent - 1
    return torch.where(values == 0, SCALE_MIN - 23, exponent)


def _scale(values: Float32[Tensor, "..."], exponent: Int32[Tensor, "..."]) -> Float32[Tensor, "..."]:
    """Multiply by 2^exponent, in two steps because 2^exponent itself may be no float32."""
    half = exponent // 2
    return torch.ldexp(torch.ldexp(values, half), exponent - half)


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
