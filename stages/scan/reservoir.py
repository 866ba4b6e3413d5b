"""Which tokens keep their activation bitmaps."""

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor


def draw_reservoir(total_tokens: int, size: int, seed: int) -> Int[Tensor, "M"]:
    """Slot of each of the stream's M tokens, -1 for those not drawn.

    All tokens are known before the scan starts, so the draw is made at once: uniform without replacement, and the same
    whatever the batch size and wherever a scan was interrupted.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(total_tokens, generator=generator)[:size].sort().values
    slots = torch.full((total_tokens,), -1, dtype=torch.int64)
    slots[drawn] = torch.arange(len(drawn))
    return slots


def slots_of_batch(slots_M: Int[Tensor, "M"], first: int, mask_BT: Bool[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """Reservoir slots of one batch, whose first real token is number `first` of the stream; -1 on padding."""
    slots_BT = torch.full(mask_BT.shape, -1, dtype=torch.int64)
    slots_BT[mask_BT] = slots_M[first : first + int(mask_BT.sum())]
    return slots_BT


def token_to_unit_major(bits_LRf: Tensor, width: int) -> Tensor:
    """Turn packed rows of tokens, (L, R, ceil(F/8)), into packed rows of units, (L, F, ceil(R/8)), layer by layer."""
    turned = []
    for bits_Rf in bits_LRf.numpy():
        bits_RF = np.unpackbits(bits_Rf, axis=1, count=width)
        turned.append(torch.from_numpy(np.packbits(bits_RF.T, axis=1)))
    return torch.stack(turned)
