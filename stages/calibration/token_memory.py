"""Memory for what a stage keeps of every token: RAM up to a limit, above it files on disk.

A file has no name in its folder, so that it is gone with the process, even a killed one. It is mapped into memory: the
system keeps of it in RAM what there is room for.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from models.config import ModelConfig, memory_bytes

if TYPE_CHECKING:
    from torch import Tensor

_MEMINFO = Path("/proc/meminfo")
_SHARE = 0.5  # of the free memory, where no limit is set
KEPT = 3  # tensors (T, D) of a layer pass: hidden states, inputs and outputs of an FFN


def free_memory() -> int | None:
    """Bytes that a process could take now; None where the system does not say."""
    if not _MEMINFO.exists():
        return None
    line = next((line for line in _MEMINFO.read_text(encoding="utf-8").splitlines() if "MemAvailable" in line), "")
    return int(line.split()[1]) * 1024 if line else None


def memory_limit(model: ModelConfig, processes: int = 1) -> float:
    """Bytes of RAM for hidden states of each of the processes: `model.hidden_memory`, or a share of what is free."""
    if model.hidden_memory is not None:
        return memory_bytes(model.hidden_memory)
    free = free_memory()
    return float("inf") if free is None else free * _SHARE / processes


def as_it_is(tensor: "Tensor") -> "Tensor":
    """Keep a tensor where it is."""
    return tensor


class TokenMemory:
    """The RAM that a stage has left for tensors of tokens, and the folder for those that it has none for."""

    def __init__(self, folder: Path, room: float) -> None:
        self._folder, self._room = folder, room

    def reserve(self, size: int) -> Callable[["Tensor"], "Tensor"]:
        """How tensors are kept that are `size` bytes in all: in RAM, all of them, or on disk."""
        if size <= self._room:
            self._room -= size
            return as_it_is
        return lambda tensor: spill(tensor, self._folder)


def spill(tensor: "Tensor", folder: Path) -> "Tensor":
    """A copy of a CPU tensor in a nameless file, which ends with the copy.

    Raises:
        OSError: the disk has no room.
    """
    import torch  # noqa: PLC0415 - settings are checked without torch

    if not tensor.numel():
        return tensor
    with TemporaryFile(dir=folder) as file:
        if sys.platform == "linux":
            # Without room set aside, a full disk would end the process at a write to the tensor.
            os.posix_fallocate(file.fileno(), 0, tensor.nbytes)
        place = f"/dev/fd/{file.fileno()}"
        held = torch.from_file(place, shared=True, size=tensor.numel(), dtype=tensor.dtype)
    return held.view(tensor.shape).copy_(tensor)
