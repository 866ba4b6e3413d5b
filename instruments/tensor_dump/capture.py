"""What is watched, and a captured tensor: its copy in host memory, and its row of the index."""

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

from instruments.precision.calls import dtype_name, is_sharded
from instruments.safetensors_reader import TORCH_DTYPES
from instruments.tensor_dump.config import TENSORS, DumpConfig
from instruments.tensor_dump.index import Placement, TensorRecord

if TYPE_CHECKING:
    from instruments.tensor_dump.recorder import Recorder


@dataclass(frozen=True, eq=False)
class Watched:
    """A module that is watched."""

    name: str
    module: nn.Module
    layer_type: str  # a key of TENSORS
    layer: int | None  # of the decoder, from 0
    # Puts the hooks on; each that it gives undoes one.
    watch: "Callable[[Watched, Recorder], Sequence[AbstractContextManager[object]]]"
    parameter: str = ""  # of the module, where that holds several layers
    chunk: int = 0  # of the pipeline, where a process has several

    def expected(self, config: DumpConfig) -> list[str]:
        """The tensors it is to give."""
        return [tensor for tensor in TENSORS[self.layer_type] if tensor in config.tensors]


def layer_of(name: str) -> int | None:
    """The first number in a module's name: model.layers.3.mlp.experts.5.up_proj is of layer 3."""
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return int(found[1]) if found else None


# fp32, bf16, fp8e4m3 ...
_NAMES = {
    dtype: re.sub("^f", "fp", name.lower().replace("_", ""))
    for name, dtype in TORCH_DTYPES.items()
    if dtype.is_floating_point
}


def quant_type_of(tensor: Tensor) -> str:
    """Its number format: fp32, bf16 ...; of a weight packed by bitsandbytes nf4, fp4 or int8."""
    state = getattr(tensor, "quant_state", None)  # of a Params4bit
    return str(state.quant_type) if state is not None else _NAMES.get(tensor.dtype, dtype_name(tensor.dtype))


def autocast_type_of(tensor: Tensor) -> str | None:
    """What matrix products of it are computed in under autocast; None without."""
    kind = tensor.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return _NAMES[torch.get_autocast_dtype(kind)]


@dataclass(frozen=True)
class Part:
    """What a process holds of a tensor: its shape in all, where its own part begins, and which axis counts tokens."""

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    token_axis: int | None
    pieces: tuple[int, int] | None = None  # as `Placement` has it

    @classmethod
    def whole(cls, tensor: Tensor, token_axis: int | None) -> "Part":
        """All of it."""
        return cls(tuple(tensor.shape), (0,) * tensor.ndim, token_axis)

    @classmethod
    def of_axis(
        cls, tensor: Tensor, axis: int, index: int, parts: int, token_axis: int | None, pieces: int = 1
    ) -> "Part":
        """Part number `index` of `parts` equal ones along `axis`.

        With several pieces the axis holds so many things one after the other (gate and up), and a part has its share
        of each.
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

    Positions are those of the whole sequence, also where a process holds a part of it.
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
    """Bytes of the ring; `data` is theirs until they are released."""

    begin: int
    end: int
    data: Tensor
    free: bool = False


class HostRing:
    """One buffer, pinned where a GPU is to copy into it; its size never grows."""

    def __init__(self, capacity: int, *, pinned: bool) -> None:
        """`capacity` in bytes."""
        self.capacity = capacity
        self.most_used = 0
        self._buffer = torch.empty(capacity, dtype=torch.uint8, pin_memory=pinned)
        self._slots: deque[Slot] = deque()
        self._changed = Condition()

    def reserve(self, size: int, *, wait: bool = False) -> Slot | None:
        """So many bytes; where there is no room now None, or with `wait` as soon as there is (within the capacity)."""
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
        """Give the bytes back; their room is used again once all older ones are given back, too."""
        with self._changed:
            slot.free = True
            while self._slots and self._slots[0].free:
                self._slots.popleft()
            self._changed.notify_all()

    @property
    def used(self) -> int:
        """Bytes between the oldest slot in use and the newest one's end."""
        if not self._slots:
            return 0
        oldest, newest = self._slots[0].begin, self._slots[-1].end
        return newest - oldest if newest > oldest else self.capacity - oldest + newest

    def _find_room(self, size: int) -> int | None:
        if not self._slots:
            return 0 if size <= self.capacity else None
        oldest, newest = self._slots[0].begin, self._slots[-1].end
        begin = newest + -newest % ALIGNMENT
        if newest > oldest:  # free: behind the newest, and before the oldest
            if begin + size <= self.capacity:
                return begin
            return 0 if size <= oldest else None
        return begin if begin + size <= oldest else None


_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


@dataclass(eq=False)
class Held:
    """Content that was copied or measured once, also when several records share it. The writer fills in the rest."""

    status: str
    data: Tensor | None = None  # on the CPU; of status statistics its moments, unless they are known already
    slot: Slot | None = None
    wait: Callable[[], None] | None = None  # before `data` is read; on the CPU copies are complete at once
    found: dict[str, Any] = field(default_factory=dict)  # statistics, file, key, checksum of its records
    rounded: dict[str, Any] = field(default_factory=dict)  # fields of the records of a rounded copy, if there is one

    @classmethod
    def copy(cls, status: str, tensor: Tensor, slot: Slot) -> "Held":
        """Begin to copy a tensor, in row-major order, into the slot; its later changes do not reach the copy."""
        host = slot.data.view(tensor.dtype).view(tensor.shape)
        if not tensor.is_cuda:
            host.copy_(tensor)
            return cls(status, host, slot)
        # Cloned in the stream that made it, so that the next kernel may overwrite it; carried away by another one.
        own = tensor.clone(memory_format=torch.contiguous_format)
        stream = _STREAMS.setdefault(tensor.device, torch.cuda.Stream(tensor.device))
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        done = torch.cuda.Event()
        with torch.cuda.stream(stream):
            host.copy_(own, non_blocking=True)
            done.record(stream)
        own.record_stream(stream)
        return cls(status, host, slot, done.synchronize)


# One tensor of one call on its way to the index: its record, as far as it is known, and its content.
Capture = tuple[TensorRecord, Held]


@dataclass(frozen=True)
class RankInfo:
    """Which process this is."""

    rank: int
    world: int
    parallel: Mapping[str, tuple[int, int]]  # tp, pp ...: coordinate and how many there are
