"""Round tensors to number formats under study: HiFloat8, the OCP Microscaling formats, bf16 and fp16."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from instruments.shapes import Float, Float32, Int32

LEAST, GREATEST = -22, 15
LARGEST = 2.0**GREATEST  # the next code, 1.5·2^15, is infinity


def round_to_hifloat8(values: Float[Tensor, "..."]) -> Float32[Tensor, "..."]:
    """Round to the nearest HiFloat8 value, ties away from zero.

    2^E has 3 mantissa bits for |E| ≤ 3, 2 up to 7, 1 up to 15, and none from 2^-16 to 2^-22, the smallest magnitude.
    Values from 1.25·2^15 become infinite, values below 2^-23 become 0.

    Numerics: exact except for the rounding.
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
    # The only zero is positive.
    return torch.where(values.isnan(), values, torch.copysign(rounded, values) + 0.0)


BLOCK = 32
# E8M0: 2^-127 to 2^127, and NaN.
SCALE_MIN, SCALE_MAX = -127, 127


@dataclass(frozen=True)
class Element:
    """A sign, exponents from `least` to `greatest`, `mantissa` bits, subnormals, no infinity."""

    least: int
    greatest: int
    mantissa: int
    largest: float  # magnitude


E4M3 = Element(least=-6, greatest=8, mantissa=3, largest=448.0)
E2M1 = Element(least=0, greatest=2, mantissa=1, largest=6.0)


def round_to_blocks(values: Float[Tensor, "*axes K"], element: Element) -> Float32[Tensor, "*axes K"]:
    """Round blocks of 32 neighbours along the last axis to elements with one scale; returns their values.

    A block's scale is 2^(⌊log2(its largest magnitude)⌋ − the element's greatest exponent); elements are rounded to
    nearest, ties to even, and saturate. A block with a value that is not finite becomes NaN, like its scale. The last
    block is padded with zeros, which change nothing.

    Numerics: exact; every step is a scaling by a power of two or a rounding of the format.
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
    """Round each value to the element format: nearest, ties to even, saturating."""
    exponent = _exponent(values).clamp(min=element.least)
    step = exponent - element.mantissa
    rounded = _scale(_scale(values, -step).round(), step)  # torch rounds ties to even
    return rounded.clamp(-element.largest, element.largest)


def _exponent(values: Float32[Tensor, "..."]) -> Int32[Tensor, "..."]:
    """⌊log2|v|⌋, exact; for 0 the smallest exponent."""
    exponent = torch.frexp(values).exponent - 1
    return torch.where(values == 0, SCALE_MIN - 23, exponent)


def _scale(values: Float32[Tensor, "..."], exponent: Int32[Tensor, "..."]) -> Float32[Tensor, "..."]:
    """Multiply by 2^exponent, in two steps because 2^exponent itself may not fit float32."""
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
def round_into(values: Float[Tensor, "*axes K"], quant_type: str) -> Float[Tensor, "*axes K"]:
    """Round to a number format: hifp8, mxfp8, mxfp4, bf16 or fp16; float32 where torch lacks the format.

    Blocks follow the last axis.
    """
    return _ROUNDINGS[quant_type](values).contiguous()
