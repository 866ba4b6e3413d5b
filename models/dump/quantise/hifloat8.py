"""HiFloat8: 8 bits whose mantissa is the wider, the nearer a magnitude is to 1.

The dot field, a prefix code, says how wide the exponent is (a sign and a magnitude whose first 1 is not stored), and so
what is left for the mantissa:

    dot   exponent bits  exponents     mantissa bits
    0001  0              0             3
    001   1              ±1            3
    01    2              ±2, ±3        3
    10    3              ±4 … ±7       2
    11    4              ±8 … ±15      1; the largest code, 1.5·2^15, stands for infinity
    0000  denormal       −22 … −16     0: 2^(m − 23) for m = 1 … 7; m = 0 is zero, and with a sign NaN

Source: arXiv:2409.16626 for the format and for rounding half away from zero (there TA). All 256 codes, and rounding
between and at the middles of all neighbours, agree with the PyPI package en-dtypes 0.0.4, but for one value: +2^-23,
which it makes 0 while −2^-23 becomes −2^-22 as here. Half away from zero asks for that; the paper's own words on the
smallest magnitudes were not at hand.
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
