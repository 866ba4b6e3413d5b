"""Memory for tensors of all tokens: RAM up to a limit, then files on disk.

The files have no name, so the system deletes them when the process ends, even if it is killed. They are mapped into
memory, and the system caches them in free RAM.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from models.config import ModelConfig, memory_bytes

if TYPE_CHECKING:
    from torch import Tensor

_MEMINFO, _MEMBERSHIP, _GROUPS = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_SHARE = 0.5  # of the free memory, if no limit is set
# Tensors (T, D) of a layer pass: hidden states, what a layer computes before its FFN, inputs and outputs of an FFN.
KEPT = 4

Keep = Callable[["Tensor"], "Tensor"]  # moves a tensor to where it is kept


def free_memory() -> int | None:
    """Bytes that a process could allocate now; None if the system does not report them.

    A container or a batch job may be allowed less than the machine has free.
    """
    if not _MEMINFO.exists():
        return None
    line = next((line for line in _MEMINFO.read_text(encoding="utf-8").splitlines() if "MemAvailable" in line), "")
    return min([int(line.split()[1]) * 1024, *control_group_rooms(_GROUPS, _MEMBERSHIP)]) if line else None


def control_group_rooms(root: Path, membership: Path) -> Iterator[int]:
    """Bytes left below the memory limit of each control group of this process; at least 0.

    Pages of files that the system can drop do not count as used.
    Source: Linux kernel documentation, admin-guide/cgroup-v2 and cgroup-v1/memory.
    """
    lines = membership.read_text(encoding="utf-8").splitlines() if membership.exists() else []
    for number, controllers, name in (line.split(":", 2) for line in lines if line.count(":") > 1):
        if number == "0" and not controllers:
            base, limit, used, dropped = root, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):  # version 1
            base, limit, used = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            dropped = "total_inactive_file"
        else:
            continue
        path = Path(name.lstrip("/"))
        # In a container the path may be the host's; only the container's own group is visible, at the base.
        for group in {base, base / path, *(base / parent for parent in path.parents)}:
            with suppress(OSError, ValueError, KeyError):  # no such group, or "max": no limit
                statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                left = int((group / limit).read_text()) - int((group / used).read_text())
                yield max(0, left + int(statistics[dropped]))


def memory_limit(model: ModelConfig, processes: int = 1) -> float:
    """Bytes of RAM per process for hidden states: `model.hidden_memory`, or a share of the free memory.

    `processes` run on this machine.
    """
    if model.hidden_memory is not None:
        return memory_bytes(model.hidden_memory)
    free = free_memory()
    return float("inf") if free is None else free * _SHARE / processes


def as_it_is(tensor: "Tensor") -> "Tensor":
    """Keep a tensor where it is."""
    return tensor


class TokenMemory:
    """The RAM that a stage has left for tensors of tokens, and the folder for tensors that do not fit."""

    def __init__(self, folder: Path, room: float) -> None:
        self._folder, self._room = folder, room

    def reserve(self, size: int) -> Keep:
        """A function that stores tensors of `size` bytes in all: all of them in RAM, or all on disk."""
        if size <= self._room:
            self._room -= size
            return as_it_is
        return lambda tensor: spill(tensor, self._folder)


def spill(tensor: "Tensor", folder: Path) -> "Tensor":
    """Copy a CPU tensor into a nameless file, which is deleted with the copy. Raises OSError: the disk has no room."""
    import torch  # noqa: PLC0415 - settings are checked without torch

    if not tensor.numel():
        return tensor
    with TemporaryFile(dir=folder) as file:
        if sys.platform == "linux":
            # Without reserved space, a write to the tensor would kill the process if the disk is full.
            os.posix_fallocate(file.fileno(), 0, tensor.nbytes)
        place = f"/dev/fd/{file.fileno()}"
        held = torch.from_file(place, shared=True, size=tensor.numel(), dtype=tensor.dtype)
    return held.view(tensor.shape).copy_(tensor)
