"""Range, sum and sum of squares of floats, in one pass over memory; torch's reductions would take four."""

from concurrent.futures import ThreadPoolExecutor
from inspect import unwrap

import numpy as np
import torch
from jaxtyping import Float
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

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
