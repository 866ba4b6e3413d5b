"""Watched modules, and captured tensors: the copy in host memory and its index row."""

import re
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from threading import Condition
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from instruments.dtypes import SAFETENSORS, dtype_name, torch_dtype
from instruments.tensor_dump.config import TENSORS, DumpConfig
from instruments.tensor_dump.record import Placement, TensorRecord
from instruments.tensors import is_sharded

if TYPE_CHECKING:
    from instruments.tensor_dump.recorder import Recorder


@dataclass(frozen=True, eq=False)
class Watched:
    """A module that is watched."""

    name: str
    module: nn.Module
    layer_type: str  # a key of TENSORS
    layer: int | None  # of the decoder, from 0
    # Installs the hooks; leaving the returned contexts removes them.
    watch: "Callable[[Watched, Recorder], Sequence[AbstractContextManager[object]]]"
    parameter: str = ""  # name within the module, where that holds several layers
    chunk: int = 0  # index of the pipeline chunk, where a process has several

    def expected(self, config: DumpConfig) -> list[str]:
        """The configured tensors that this kind of module has."""
        return [tensor for tensor in TENSORS[self.layer_type] if tensor in config.tensors]


def layer_of(name: str) -> int | None:
    """The first number in a module's name: 3 for model.layers.3.mlp.experts.5.up_proj."""
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return int(found[1]) if found else None


# fp32, bf16, fp8e4m3 ...
_NAMES = {
    torch_dtype(name): re.sub("^f", "fp", name.lower().replace("_", ""))
    for name in SAFETENSORS
    if torch_dtype(name).is_floating_point
}


def quant_type_of(tensor: Tensor) -> str:
    """Number format: fp32, bf16 ...; for weights packed by bitsandbytes nf4, fp4 or int8."""
    state = getattr(tensor, "quant_state", None)  # of a Params4bit
    return str(state.quant_type) if state is not None else _NAMES.get(tensor.dtype, dtype_name(tensor.dtype))


def autocast_type_of(tensor: Tensor) -> str | None:
    """The format of its matrix products under autocast; None without autocast."""
    kind = tensor.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return _NAMES[torch.get_autocast_dtype(kind)]


@dataclass(frozen=True)
class Part:
    """A process's part of a tensor: the whole's shape, the part's offset, and the axis of tokens."""

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    token_axis: int | None
    pieces: tuple[int, int] | None = None  # as in `Placement`

    @classmethod
    def whole(cls, tensor: Tensor, token_axis: int | None) -> "Part":
        """The whole tensor."""
        return cls(tuple(tensor.shape), (0,) * tensor.ndim, token_axis)

    @classmethod
    def of_axis(
        cls, tensor: Tensor, axis: int, index: int, parts: int, token_axis: int | None, pieces: int = 1
    ) -> "Part":
        """Part number `index` of `parts` equal ones along `axis`.

        With `pieces` > 1 the axis concatenates that many matrices (gate and up), and a part holds its share of each.
        """
        shape, offset = list(tensor.shape), [0] * tensor.ndim
        offset[axis], shape[axis] = index * shape[axis] // pieces, parts * shape[axis]
        return cls(tuple(shape), tuple(offset), token_axis, (axis, pieces) if pieces > 1 and parts > 1 else None)


def take_local(weight: Tensor) -> tuple[Tensor, Part]:
    """This process's part of a weight, and its place in the whole."""
    if not is_sharded(weight):
        return weight, Part.whole(weight, None)
    sharded: Any = weight
    offset = [0] * weight.ndim
    for axis, placement in enumerate(sharded.placements):
        if placement.is_shard():
            chunk = -(-weight.shape[placement.dim] // sharded.device_mesh.size(axis))
            begin = sharded.device_mesh.get_local_rank(axis) * chunk
            offset[placement.dim] = min(begin, weight.shape[placement.dim])
    return sharded.to_local(), Part(tuple(weight.shape), tuple(offset), None)


def keep_tokens(tensor: Tensor, part: Part, config: DumpConfig) -> tuple[Tensor, Placement]:
    """The kept positions of a tensor, and their place among the kept positions of all parts.

    Positions count over the whole sequence, also where a process holds only part of it.
    """
    axis = part.token_axis
    first, every, most = config.first_token, config.every_tokens, config.max_tokens
    if axis is None or (first, every, most) == (0, 1, None):
        return tensor, Placement(part.global_shape, part.offset, part.pieces)
    chosen = range(part.global_shape[axis])[first::every][:most]
    begin, end = part.offset[axis], part.offset[axis] + tensor.shape[axis]
    before, until = bisect_left(chosen, begin), bisect_left(chosen, end)
    mine = chosen[before:until]
    index = [slice(None)] * tensor.ndim
    index[axis] = slice(mine[0] - begin, mine[-1] - begin + 1, every) if mine else slice(0, 0)
    shape, offset = list(part.global_shape), list(part.offset)
    shape[axis], offset[axis] = len(chosen), before
    return tensor[tuple(index)], Placement(tuple(shape), tuple(offset), part.pieces, (first, every, len(chosen)))


ALIGNMENT = 64


@dataclass(eq=False)
class Slot:
    """A range of bytes of the ring; `data` is valid until release."""

    begin: int
    end: int
    data: Tensor
    free: bool = False


class HostRing:
    """One buffer of fixed size in host memory, pinned if a GPU copies into it."""

    def __init__(self, capacity: int, *, pinned: bool) -> None:
        """`capacity` in bytes."""
        self.capacity = capacity
        self.most_used = 0
        self._buffer = torch.empty(capacity, dtype=torch.uint8, pin_memory=pinned)
        self._slots: deque[Slot] = deque()
        self._changed = Condition()

    def reserve(self, size: int, *, wait: bool = False) -> Slot | None:
        """Reserve `size` bytes; if there is no room, None, or with `wait` block until there is (size ≤ capacity)."""
        with self._changed:
            while (begin := self._find_room(max(size, 1))) is None:
                if not wait:
                    return None
                self._changed.wait()
            slot = Slot(begin, begin + max(size, 1), self._buffer[begin : begin + size])
            self._slots.append(slot)
            self.most_used = max(self.most_used, self.used)
            return slot

    def release(self, slot: Slot) -> None:
        """Release the slot; its room is reused once all older slots are released, too."""
        with self._changed:
            slot.free = True
            while self._slots and self._slots[0].free:
                self._slots.popleft()
            self._changed.notify_all()

    @property
    def used(self) -> int:
        """Bytes from the start of the oldest slot in use to the end of the newest."""
        if not self._slots:
            return 0
        oldest, newest = self._slots[0].begin, self._slots[-1].end
        return newest - oldest if newest > oldest else self.capacity - oldest + newest

    def _find_room(self, size: int) -> int | None:
        if not self._slots:
            return 0 if size <= self.capacity else None
        oldest, newest = self._slots[0].begin, self._slots[-1].end
        begin = newest + -newest % ALIGNMENT
        if newest > oldest:  # free: after the newest, and before the oldest
            if begin + size <= self.capacity:
                return begin
            return 0 if size <= oldest else None
        return begin if begin + size <= oldest else None


_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


@dataclass(eq=False)
class Held:
    """Content copied or measured once and shared by its records; the writer fills in `found` and `rounded`."""

    status: str
    data: Tensor | None = None  # on the CPU; with status statistics the moments, unless `found` has them
    slot: Slot | None = None
    wait: Callable[[], None] | None = None  # call before reading `data`; None where the copy is complete
    found: dict[str, Any] = field(default_factory=dict)  # statistics, file, key, checksum for its records
    rounded: dict[str, Any] = field(default_factory=dict)  # record fields of a rounded copy, if there is one

    @classmethod
    def copy(cls, status: str, tensor: Tensor, slot: Slot) -> "Held":
        """Start to copy a tensor, row-major, into the slot; later changes of the tensor do not affect the copy."""
        host = slot.data.view(tensor.dtype).view(tensor.shape)
        if not tensor.is_cuda:
            host.copy_(tensor)
            return cls(status, host, slot)
        # Clone in the current stream, so that the next kernel may overwrite it; copy to the host in another stream.
        own = tensor.clone(memory_format=torch.contiguous_format)
        stream = _STREAMS.setdefault(tensor.device, torch.cuda.Stream(tensor.device))
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        done = torch.cuda.Event()
        with torch.cuda.stream(stream):
            host.copy_(own, non_blocking=True)
            done.record(stream)
        own.record_stream(stream)
        return cls(status, host, slot, done.synchronize)


# One tensor of one call: its record, still incomplete, and its content.
Capture = tuple[TensorRecord, Held]


@dataclass(frozen=True)
class RankInfo:
    """Rank of this process and its coordinates in the parallel groups."""

    rank: int
    world: int
    parallel: Mapping[str, tuple[int, int]]  # tp, pp ...: coordinate and group size
