"""Range, mean and deviation of a tensor, in one pass over it where numbers allow."""

import math
from concurrent.futures import ThreadPoolExecutor
from inspect import unwrap

import numpy as np
import torch
from jaxtyping import Float, Shaped
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from instruments.tensor_dump.records import Statistics

# Accumulators side by side, which the compiler makes vectors of.
_LANES = 64
# Values that are added up in float32 before they go on in float64: as many for every lane.
_BLOCK = 4096
# Values for one thread at least: fewer are done before it has begun.
_SPAN = 2**20


def sum_moments(values_N: Float[Tensor, "N"]) -> tuple[float, float, float, float]:
    """Minimum, maximum, sum and sum of squares of float32 values on the CPU, N ≥ 1.

    Where one is not finite, or a square overflows, the last two are not finite and the first two mean nothing.
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


# Without the interpreter's lock, so that threads work side by side. What tests wrap for type checks is unwrapped.
_sum_span = njit(nogil=True, cache=True)(unwrap(_sum_values))


# Below this share of mean², the difference of two sums no longer tells the variance.
_CANCELLATION = 0.01
# Values that are widened at a time, half a MiB: they are still in the cache when they are read.
_PIECE = 2**17


@torch.no_grad()
def measure(tensor: Shaped[Tensor, "..."]) -> Statistics:
    """Statistics of a tensor on the CPU, over its finite values.

    Numerics: sums in float32, their difference in float64; mean within 1e-5 of the root mean square, deviation within
    1e-3 of itself. Where that could fail (a mean far larger than the deviation, an overflow, values that are not
    finite) everything is computed in float64 instead.
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
    """All values in the order of the memory, without a copy where there is no gap; statistics know no order."""
    axes = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return tensor.permute(axes).reshape(-1)


@torch.no_grad()
def exact_moments(tensor: Shaped[Tensor, "..."]) -> Float[Tensor, "5"]:
    """Minimum, maximum, mean, deviation and number of finite values, on the tensor's device and without waiting for it.

    Numerics: float64 on the CPU, float32 elsewhere; the deviation is taken from the mean, in a second pass.
    """
    values = tensor.double() if tensor.device.type == "cpu" else tensor.float()
    finite = values.isfinite()
    count = finite.sum()
    mean = torch.where(finite, values, 0).sum() / count
    deviation = (torch.where(finite, values - mean, 0).square().sum() / count).sqrt()
    low, high = torch.where(finite, values, math.inf).amin(), torch.where(finite, values, -math.inf).amax()
    return torch.stack([low, high, mean, deviation, count.to(values.dtype)])


def read_moments(moments: Float[Tensor, "5"], size: int) -> Statistics:
    """What `exact_moments` found in a tensor of so many values."""
    low, high, mean, deviation, count = moments.tolist()
    if not count:
        return Statistics(None, None, None, None, size)
    return Statistics(low, high, mean, deviation, size - int(count))
