"""Range, mean and deviation of a tensor; copies rounded to number formats."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from inspect import unwrap

import numpy as np
import torch
from jaxtyping import Float, Float32, Int32, Shaped
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from instruments.tensor_dump.record import RoundingError, Statistics

# Parallel accumulators, which the compiler vectorises.
_LANES = 64
# Values summed in float32 before their sums are added in float64, over all lanes.
_BLOCK = 4096
# Least values per thread: fewer take less time than starting it.
_SPAN = 2**20


def sum_moments(values_N: Float[Tensor, "N"]) -> tuple[float, float, float, float]:
    """Minimum, maximum, sum and sum of squares of float32 values on the CPU, N ≥ 1.

    If a value is not finite or a square overflows, the sum of squares is not finite and the other results may be
    invalid.
    """
    values = values_N.numpy()
    count = min(torch.get_num_threads(), len(values) // _SPAN)
    if count <= 1:
        low, high, total, square = _sum_span(values)
        return low, high, total, square
    with ThreadPoolExecutor(count) as threads:
        parts = list(threads.map(_sum_span, np.array_split(values, count)))
    lows, highs, totals, squares = zip(*parts, strict=True)
    return min(lows), max(highs), sum(totals), sum(squares)


def _sum_values(values: NDArray[np.float32]) -> tuple[float, float, float, float]:
    low, high = np.full(_LANES, np.inf, np.float32), np.full(_LANES, -np.inf, np.float32)
    total, square = 0.0, 0.0
    whole = len(values) // _LANES * _LANES
    for first in range(0, whole, _BLOCK):
        sums, squares = np.zeros(_LANES, np.float32), np.zeros(_LANES, np.float32)
        for begin in range(first, min(first + _BLOCK, whole), _LANES):
            row = values[begin : begin + _LANES]
            for lane in range(_LANES):
                value = row[lane]
                sums[lane] += value
                squares[lane] += value * value
                low[lane] = min(low[lane], value)
                high[lane] = max(high[lane], value)
        for lane in range(_LANES):
            total += np.float64(sums[lane])
            square += np.float64(squares[lane])
    for place in range(whole, len(values)):
        value = values[place]
        total += np.float64(value)
        square += np.float64(value) * np.float64(value)
        low[0], high[0] = min(low[0], value), max(high[0], value)
    return low.min(), high.max(), total, square


# Without the interpreter's lock, so that threads run in parallel; unwrapped from the type checks of the tests.
_sum_span = njit(nogil=True, cache=True)(unwrap(_sum_values))


# Below this share of mean², the variance cannot be computed as a difference of two sums.
_CANCELLATION = 0.01
# Values converted to float32 at a time, 512 KiB: they stay in the cache.
_PIECE = 2**17


@torch.no_grad()
def measure(tensor: Shaped[Tensor, "..."]) -> Statistics:
    """Statistics of a tensor on the CPU, over its finite values.

    Numerics: sums in float32, their difference in float64; mean within 1e-5 of the root mean square, deviation within a
        relative 1e-3. Where this could fail (mean far larger than the deviation, overflow, values that are not finite),
        all is computed in float64.
    """
    if not tensor.numel():
        return Statistics(None, None, None, None, 0)
    flat = _flatten(tensor)
    parts = [sum_moments(piece.float()) for piece in (flat.split(_PIECE) if flat.dtype != torch.float32 else [flat])]
    lows, highs, totals, squares = zip(*parts, strict=True)
    mean, square = sum(totals) / flat.numel(), sum(squares) / flat.numel()
    variance = square - mean**2
    if not math.isfinite(square) or variance < _CANCELLATION * mean**2:
        return read_moments(exact_moments(flat), flat.numel())
    return Statistics(min(lows), max(highs), mean, math.sqrt(variance), 0)


def _flatten(tensor: Shaped[Tensor, "..."]) -> Shaped[Tensor, "size"]:
    """All values in memory order, without a copy if there are no gaps; statistics do not depend on the order."""
    axes = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return tensor.permute(axes).reshape(-1)


@torch.no_grad()
def exact_moments(tensor: Shaped[Tensor, "..."]) -> Float[Tensor, "5"]:
    """Minimum, maximum, mean and deviation of the finite values, and the number of others, without synchronisation.

    On the tensor's device; the minimum is infinite if no value is finite.
    Numerics: float64 on the CPU, float32 elsewhere; the deviation is computed from the mean in a second pass.
    """
    values = tensor.double() if tensor.device.type == "cpu" else tensor.float()
    if not values.numel():
        return values.new_tensor([math.inf, -math.inf, 0.0, 0.0, 0.0])
    finite = values.isfinite()
    count = finite.sum()
    mean = torch.where(finite, values, 0).sum() / count
    deviation = (torch.where(finite, values - mean, 0).square().sum() / count).sqrt()
    low, high = torch.where(finite, values, math.inf).amin(), torch.where(finite, values, -math.inf).amax()
    # The others are few: in float32 the count of the finite values would not be exact above 2^24.
    return torch.stack([low, high, mean, deviation, (~finite).sum().to(values.dtype)])


def read_moments(moments: Float[Tensor, "5"], size: int) -> Statistics:
    """Statistics from the moments that `exact_moments` computed of a tensor of `size` values."""
    low, high, mean, deviation, nonfinite = moments.tolist()
    if low == math.inf:
        return Statistics(None, None, None, None, size)
    return Statistics(low, high, mean, deviation, int(nonfinite))


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
def round_into(values: Float[Tensor, "..."], quant_type: str) -> tuple[Float[Tensor, "..."], RoundingError]:
    """Round to a number format; returns the values, float32 where torch lacks the format, and the error.

    Block formats need at least one axis: their blocks follow the last.
    """
    rounded = _ROUNDINGS[quant_type](values)
    exact = values.double()
    difference = rounded.double() - exact
    signal, noise = float(torch.linalg.vector_norm(exact)), float(torch.linalg.vector_norm(difference))
    relative = noise / signal if signal else (0.0 if noise == 0 else math.inf)
    decibels = -20 * math.log10(relative) if 0 < relative < math.inf else None
    largest = float(difference.abs().max()) if values.numel() else 0.0
    return rounded.contiguous(), RoundingError(relative, decibels, largest)
