"""HiFloat8: 8 bits whose mantissa is the wider, the nearer a magnitude is to 1.

Source: arXiv:2409.16626, sections 2 (definition) and 3 (rounding half away from zero, there called TA).
"""

import math

import torch
from jaxtyping import Float, Float32
from torch import Tensor

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
