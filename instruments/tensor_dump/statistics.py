"""Range, mean and deviation of a tensor."""

import math

import torch
from torch import Tensor

from instruments.tensor_dump.index import Statistics

# Below this share of mean², the variance cannot be computed as a difference of two sums.
_CANCELLATION = 0.01
# Values that are read at a time, 512 KiB in float32: they stay in the cache.
_PIECE = 2**17


@torch.no_grad()
def measure(tensor: Tensor) -> Statistics:
    """Statistics of a tensor on the CPU, over its finite values.

    Numerics: sums of 2^17 values in float32, their sums in float64; mean within 1e-5 of the root mean square, deviation
        within a relative 1e-3. Where this could fail (mean far larger than the deviation, overflow, values that are not
        finite), all is computed in float64.
    """
    if not tensor.numel():
        return Statistics(None, None, None, None, 0)
    flat = _flatten(tensor)
    low, high, total, square = math.inf, -math.inf, 0.0, 0.0
    for piece in flat.split(_PIECE):
        values = piece.float()
        least, most = torch.aminmax(values)
        low, high = min(low, least.item()), max(high, most.item())
        total += values.sum().item()
        square += torch.dot(values, values).item()
    mean = total / flat.numel()
    variance = square / flat.numel() - mean**2
    if not math.isfinite(square) or variance < _CANCELLATION * mean**2:
        return read_moments(exact_moments(flat), flat.numel())
    return Statistics(low, high, mean, math.sqrt(variance), 0)


def _flatten(tensor: Tensor) -> Tensor:
    """All values in memory order, without a copy if there are no gaps; statistics do not depend on the order."""
    axes = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return tensor.permute(axes).reshape(-1)


@torch.no_grad()
def exact_moments(tensor: Tensor) -> Tensor:
    """``(5,)`` minimum, maximum, mean and deviation of the finite values, and the number of others.

    On the tensor's device, without synchronisation; the minimum is infinite if no value is finite.
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


def read_moments(moments: Tensor, size: int) -> Statistics:
    """Statistics from the moments that `exact_moments` computed of a tensor of `size` values."""
    low, high, mean, deviation, nonfinite = moments.tolist()
    if low == math.inf:
        return Statistics(None, None, None, None, size)
    return Statistics(low, high, mean, deviation, int(nonfinite))
