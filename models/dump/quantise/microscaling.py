"""MXFP8 and MXFP4: blocks of 32 values with one power-of-two scale.

Source: OCP Microscaling Formats (MX) Specification, version 1.0, sections 5.2, 5.3, 5.4 and 6.3.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float32, Int32
from torch import Tensor

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
