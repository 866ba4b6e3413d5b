"""Range, mean and deviation of a tensor, in one pass over it where numbers allow."""

import math

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from models.dump.moments_kernel import sum_moments
from models.dump.records import Statistics

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
