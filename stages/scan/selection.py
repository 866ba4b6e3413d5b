"""Which units are active for a token."""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor


def kth_largest(magnitude_TF: Float[Tensor, "T F"], count: int) -> Float[Tensor, "T 1"]:
    """The `count`-th largest value of each row.

    On the CPU numpy's vectorised selection takes a third of the time of torch's.
    """
    if magnitude_TF.device.type == "cpu":
        place = magnitude_TF.shape[1] - count
        return torch.from_numpy(np.partition(magnitude_TF.numpy(), place, axis=1)[:, place : place + 1])
    return magnitude_TF.topk(count, dim=1, sorted=False).values.amin(1, keepdim=True)


def mark_active_(magnitude_TF: Float[Tensor, "T F"], share: float, threshold: float | None) -> Float[Tensor, "T F"]:
    """Overwrite |h| by 1 where the unit is active and by 0 elsewhere.

    Args:
        magnitude_TF: |h|, fp32; overwritten.
        share: a unit is active in the token's top `share` of |h|, ties included, zeros never.
        threshold: when set, a unit is active where |h| exceeds it, whatever `share` says.

    Returns:
        The same tensor. Floats, because sums of booleans are converted element by element.
    """
    if threshold is not None:
        return magnitude_TF.gt_(threshold)
    count = max(1, round(share * magnitude_TF.shape[1]))
    lowest_T1 = kth_largest(magnitude_TF, count).clamp_min(torch.finfo(torch.float32).tiny)
    return magnitude_TF.ge_(lowest_T1)


def pack_bits(active_RF: Float[Tensor, "R F"]) -> Tensor:
    """Rows of zeros and ones as bits, (R, ceil(F/8)) uint8, most significant first as numpy.packbits does."""
    padded = torch.nn.functional.pad(active_RF, (0, -active_RF.shape[1] % 8))
    weights = 2.0 ** torch.arange(7, -1, -1, device=active_RF.device)
    return (padded.unflatten(1, (-1, 8)) @ weights).to(torch.uint8)
