"""A row of a dump's index: one tensor of one call."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from math import prod
from typing import Any

from instruments.json_kinds import check_fields, kinds_of

# Which content was kept: the bytes, only the statistics, or nothing.
STORED, STATISTICS, DROPPED = "stored", "statistics", "dropped"


@dataclass(frozen=True)
class Source:
    """The call that a record belongs to, and the tensor of that call."""

    step: int
    microbatch: int  # forward pass of the model within the step, from 0; evaluation has its own count
    call: int  # of the module within the microbatch, from 0
    evaluation: bool  # in a forward pass without gradients, which is not a microbatch of the training
    direction: str  # forward or backward
    recompute: bool  # in a forward pass that was recomputed for the backward pass
    module: str  # name in the model
    layer: int | None  # of the decoder, from 0; None outside it
    layer_type: str  # linear, attention, embedding ...
    tensor: str  # input, weight, grad_output, query ...


@dataclass(frozen=True)
class Placement:
    """Place of a process's part in the tensor that all processes hold together."""

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]  # of the first piece
    # (axis, n): along the axis the part is n equal pieces, evenly spaced in the whole; None: one piece.
    pieces: tuple[int, int] | None = None
    tokens: tuple[int, int, int] | None = None  # first position, step, number kept; None: all positions


@dataclass(frozen=True)
class Statistics:
    """Statistics of the finite values; None if there are none."""

    minimum: float | None
    maximum: float | None
    mean: float | None
    std: float | None  # of the population
    nonfinite: int  # NaN and infinite values

    @property
    def all_zero(self) -> bool:
        """Whether every value is 0."""
        return self.minimum == 0 and self.maximum == 0 and not self.nonfinite


@dataclass(frozen=True)
class RoundingError:
    """The error of rounding a tensor to a number format."""

    relative_l2: float  # ‖rounded − x‖ ÷ ‖x‖
    sqnr_db: float | None  # 10·log10(‖x‖² ÷ ‖rounded − x‖²); None unless finite
    max_abs: float


_PARTS: dict[str, Any] = {"source": Source, "placement": Placement, "statistics": Statistics, "rounding": RoundingError}


@dataclass(frozen=True)
class TensorRecord:
    """A row of the index."""

    name: str
    counter: int
    timestamp: str
    rank: int
    source: Source
    parallel: Mapping[str, tuple[int, int]]  # tp, pp ...: this process's coordinate and the group's size
    placement: Placement
    shape: tuple[int, ...]
    dtype: str
    device: str
    requires_grad: bool
    quant_type: str  # real format: fp32, bf16, nf4 ...; of a rounded copy, the format rounded to
    label: str | None  # the format that the user named
    autocast: str | None  # format of the computation under autocast
    status: str
    statistics: Statistics | None = None
    file: str | None = None  # in the folder of the dump
    key: str | None = None  # in the file; several records may share one
    checksum: int | None = None  # CRC-32 of the stored bytes
    rounded_from: str | None = None  # name of the record that was rounded
    rounding: RoundingError | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def to_row(self) -> dict[str, Any]:
        """The record as JSON values."""
        nested = {name: vars(part) for name in _PARTS if (part := getattr(self, name)) is not None}
        return {**vars(self), **nested}  # asdict copies every value, at ten times the cost

    @classmethod
    def from_row(cls, row: Any) -> "TensorRecord":  # noqa: ANN401
        """The inverse of `to_row`, checking field types and that names contain no folder. Raises ValueError."""
        check_fields(row, _ROW)
        values = {name: _frozen(row[name]) for name in _ROW if name != "metadata"}
        for name, kind in _PARTS.items():
            if (part := values[name]) is not None:
                values[name] = kind(**{one.name: part[one.name] for one in fields(kind)})
        record = cls(**values, metadata=row["metadata"])
        _check_record(record)
        return record


_ROW = kinds_of(TensorRecord)


def _frozen(value: Any) -> Any:  # noqa: ANN401
    """Replace lists by tuples."""
    if isinstance(value, dict):
        return {name: _frozen(part) for name, part in value.items()}
    return tuple(value) if isinstance(value, list) else value


def _check_record(record: TensorRecord) -> None:
    for field_name, name in (("name", record.name), ("file", record.file)):
        if name is not None and not is_bare(name):
            raise ValueError(f"{field_name} {name!r} is no name of a file in the dump's folder")
    if max(_size(record.shape), _size(record.placement.global_shape)) > _MOST:
        raise ValueError(f"shape {list(record.shape)} is too large for a tensor")
    if not len(record.shape) == len(record.placement.global_shape) == len(record.placement.offset):
        raise ValueError(f"the placement of shape {list(record.shape)} has other axes")
    if record.status not in {STORED, STATISTICS, DROPPED}:
        raise ValueError(f"status {record.status!r} is none of {STORED}, {STATISTICS}, {DROPPED}")
    if record.status == STORED and None in {record.file, record.key, record.checksum}:
        raise ValueError("a stored tensor needs file, key and checksum")


def is_bare(name: str) -> bool:
    """Whether a name read from a file can only name a file in the folder itself."""
    return name not in {"", ".", ".."} and len(name.encode()) <= _LONGEST and not set(name) & set("/\\\0")


_MOST = 1 << 62  # values of a tensor
_LONGEST = 240  # bytes of a file name, before its suffix


def _size(shape: Sequence[int]) -> int:
    return prod(max(side, 1) for side in shape)


def make_name(timestamp: str, counter: int, source: Source, quant_type: str) -> str:
    """`{timestamp}_{counter:04}_{layer_type}_L{layer}_{operation}_{quant_type}_{tensor_name}`.

    The counter alone is unique over all processes of a dump.
    """
    layer = "none" if source.layer is None else source.layer
    kind = source.layer_type.replace("_", "-")  # readers split names at underscores
    return f"{timestamp}_{counter:04}_{kind}_L{layer}_{source.direction}_{quant_type}_{source.tensor}"


def now() -> str:
    """UTC to the microsecond, without characters special in file names and without the separator of record names."""
    return datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")
