"""From a capture whose bytes have a place to its row of the index."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from models.dump.capture import Capture, Rounded
from models.dump.records import TensorRecord, make_name


@dataclass(frozen=True)
class Identity:
    """Which process this is."""

    rank: int
    world: int
    parallel: Mapping[str, tuple[int, int]]  # tp, pp ...: coordinate and how many there are


def make_record(
    name: str, capture: Capture, identity: Identity, label: str | None, metadata: Mapping[str, Any]
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
