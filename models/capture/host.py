"""Tensors from their devices to the CPU, together."""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same tensors on the CPU, in their own number formats; those of one device travel in one transfer."""
    places: dict[torch.device, list[int]] = defaultdict(list)
    for place, tensor in enumerate(tensors):
        places[tensor.device].append(place)
    found = list(tensors)
    for group in places.values():
        moved = torch.cat([tensors[place].detach().contiguous().view(-1).view(torch.uint8) for place in group]).cpu()
        sizes = [tensors[place].numel() * tensors[place].element_size() for place in group]
        for place, data in zip(group, moved.split(sizes), strict=True):
            # Copied, so that it begins where its number format may begin.
            found[place] = data.clone().view(tensors[place].dtype).view(tensors[place].shape)
    return found
