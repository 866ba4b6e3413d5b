"""A captured tensor: its copy in host memory, and its row of the index."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from threading import Condition
from typing import Any

import torch
from torch import Tensor

from instruments.tensor_dump.index import (
    DROPPED,
    STATISTICS,
    STORED,
    Placement,
    RoundingError,
    Source,
    Statistics,
    TensorRecord,
    make_name,
)
from instruments.tensor_dump.watched import autocast_type_of, quant_type_of

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

    def reserve(self, size: int) -> Slot | None:
        """So many bytes, or None where there is no room now."""
        with self._changed:
            begin = self._find_room(max(size, 1))
            if begin is None:
                return None
            slot = Slot(begin, begin + max(size, 1), self._buffer[begin : begin + size])
            self._slots.append(slot)
            self.most_used = max(self.most_used, self.used)
            return slot

    def wait(self, size: int) -> Slot:
        """So many bytes, as soon as there is room; `size` must not be above the capacity."""
        assert size <= self.capacity, "larger than the ring: it would wait forever"
        with self._changed:
            while (slot := self.reserve(size)) is None:
                self._changed.wait()
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
        oldest, begin = self._slots[0].begin, _aligned(self._slots[-1].end)
        if self._slots[-1].end > oldest:  # free: behind the newest, and before the oldest
            if begin + size <= self.capacity:
                return begin
            return 0 if size <= oldest else None
        return begin if begin + size <= oldest else None


def _aligned(position: int) -> int:
    return position + -position % ALIGNMENT


_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


def _ready() -> None:
    """Copies on the CPU are complete at once."""


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


@dataclass(eq=False)
class Held:
    """Content that was copied or measured once, also when several records share it. The writer fills in the rest."""

    status: str
    data: Tensor | None = None  # on the CPU; of status statistics its moments, unless they are known already
    slot: Slot | None = None
    wait: Callable[[], None] | None = None  # before `data` is read
    statistics: Statistics | None = None
    file: str | None = None
    key: str | None = None
    checksum: int | None = None
    rounded: "Rounded | None" = None

    @classmethod
    def dropped(cls) -> "Held":
        """Nothing but the fact."""
        return cls(DROPPED)

    @classmethod
    def measured(cls, statistics: Statistics) -> "Held":
        """Numbers alone."""
        return cls(STATISTICS, statistics=statistics)

    @property
    def stored(self) -> bool:
        """Whether its bytes are kept."""
        return self.status == STORED


@dataclass(frozen=True)
class Rounded:
    """A copy rounded into a number format, as it was written."""

    quant_type: str
    statistics: Statistics
    error: RoundingError
    file: str
    key: str
    checksum: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Facts:
    """What is recorded of a tensor in addition to its content."""

    shape: tuple[int, ...]
    dtype: str
    device: str
    requires_grad: bool
    quant_type: str
    autocast: str | None

    @classmethod
    def of(cls, tensor: Tensor, kept: Tensor) -> "Facts":
        """Of a tensor, and the part of it that is kept."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(
            tuple(kept.shape),
            dtype,
            str(tensor.device),
            tensor.requires_grad,
            quant_type_of(tensor),
            autocast_type_of(tensor),
        )


@dataclass(frozen=True, eq=False)
class Capture:
    """One tensor of one call, on its way to the index."""

    counter: int
    timestamp: str
    source: Source
    placement: Placement
    facts: Facts
    held: Held


@dataclass(frozen=True)
class RankInfo:
    """Which process this is."""

    rank: int
    world: int
    parallel: Mapping[str, tuple[int, int]]  # tp, pp ...: coordinate and how many there are


def make_record(
    name: str, capture: Capture, identity: RankInfo, label: str | None, metadata: Mapping[str, Any]
) -> TensorRecord:
    """The row of a tensor; `label` is what it was said to be."""
    held, facts = capture.held, capture.facts
    return TensorRecord(
        name=name,
        counter=capture.counter,
        timestamp=capture.timestamp,
        rank=identity.rank,
        source=capture.source,
        parallel=identity.parallel,
        placement=capture.placement,
        shape=facts.shape,
        dtype=facts.dtype,
        device=facts.device,
        requires_grad=facts.requires_grad,
        quant_type=facts.quant_type,
        label=label,
        autocast=facts.autocast,
        status=held.status,
        statistics=held.statistics,
        file=held.file,
        key=held.key,
        checksum=held.checksum,
        metadata=metadata,
    )


def make_rounded_record(record: TensorRecord, capture: Capture, rounded: Rounded) -> TensorRecord:
    """The row of the copy of a tensor that was rounded into a number format."""
    return replace(
        record,
        name=make_name(capture.timestamp, capture.counter, capture.source, rounded.quant_type),
        dtype=str(rounded.dtype).removeprefix("torch."),
        quant_type=rounded.quant_type,
        statistics=rounded.statistics,
        file=rounded.file,
        key=rounded.key,
        checksum=rounded.checksum,
        rounded_from=record.name,
        rounding=rounded.error,
    )
