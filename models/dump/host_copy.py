"""Tensors on their way to host memory, without making the device wait."""

from collections.abc import Callable

import torch
from torch import Tensor

from models.dump.ring import Slot

_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


def _ready() -> None:
    """What lies on the CPU is there at once."""


def copy_to_slot(tensor: Tensor, slot: Slot) -> tuple[Tensor, Callable[[], None]]:
    """Begin to copy a tensor, in row-major order, into the slot.

    Later changes of the tensor do not reach the copy.

    Returns:
        The copy, and what to call before it is read.
    """
    host = slot.data.view(tensor.dtype).view(tensor.shape)
    if not tensor.is_cuda:
        host.copy_(tensor)
        return host, _ready
    # Cloned in the stream that made it, so that the next kernel may overwrite it; carried away by another one.
    own = tensor.clone(memory_format=torch.contiguous_format)
    stream = _STREAMS.setdefault(tensor.device, torch.cuda.Stream(tensor.device))
    stream.wait_stream(torch.cuda.current_stream(tensor.device))
    done = torch.cuda.Event()
    with torch.cuda.stream(stream):
        host.copy_(own, non_blocking=True)
        done.record(stream)
    own.record_stream(stream)
    return host, done.synchronize
