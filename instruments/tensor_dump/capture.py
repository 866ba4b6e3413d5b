"""From a hook's tensor to a row of the index."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from instruments.tensor_dump.host_memory import Slot
from instruments.tensor_dump.records import (
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


@dataclass(eq=False)
class Held:
    """Content that was copied or measured once, whoever shares it. The writer fills in what it finds."""

    status: str
    data: Tensor | None = None  # on the CPU; of status statistics its moments, unless they are known already
    slot: Slot | None = None
    wait: Callable[[], None] | None = None  # before `data` is read
    statistics: Statistics | None = None
    file: str | None = None
    key: str | None = None
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
    dtype: torch.dtype


@dataclass(frozen=True)
class Facts:
    """What is recorded of a tensor beside its content."""

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
        rounded_from=record.name,
        rounding=rounded.error,
    )
