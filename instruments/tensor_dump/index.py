"""The index of a dump: JSON lines that only grow, one tensor each."""

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from datetime import UTC, datetime
from fcntl import LOCK_EX, LOCK_NB, flock
from fnmatch import fnmatchcase
from functools import cached_property
from math import prod
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from instruments.durable import sync
from instruments.errors import ContractError

# What became of the bytes. statistics: only the numbers of the row were kept; dropped: not even those.
STORED, STATISTICS, DROPPED = "stored", "statistics", "dropped"
_NESTED = ("source", "placement", "statistics", "rounding")


@dataclass(frozen=True)
class Source:
    """The call and the tensor of it that a record is about."""

    step: int
    microbatch: int  # forward passes of the model within the step, from 0
    call: int  # of the module within the microbatch, from 0
    direction: str  # forward or backward
    recompute: bool  # of a forward pass that was run again for the backward pass
    module: str  # as the model names it
    layer: int | None  # of the decoder, from 0; None outside it
    layer_type: str  # linear, attention or experts
    tensor: str  # input, weight, grad_output, query ...


@dataclass(frozen=True)
class Placement:
    """Place of a process's part in the tensor that all processes hold together."""

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]  # of the first piece
    # Axis along which the part is made of so many pieces of the whole, evenly spread over it; None: it is one piece.
    pieces: tuple[int, int] | None = None
    tokens: tuple[int, int, int] | None = None  # first position, distance, number kept; None: all of them


@dataclass(frozen=True)
class Statistics:
    """Of the finite values; None where there is none."""

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
    """What rounding into a number format did to a tensor."""

    relative_l2: float  # ‖rounded − x‖ ÷ ‖x‖
    sqnr_db: float | None  # 10·log10(‖x‖² ÷ ‖rounded − x‖²); None where nothing was lost
    max_abs: float


@dataclass(frozen=True)
class TensorRecord:
    """A row of the index."""

    name: str
    counter: int
    timestamp: str
    rank: int
    source: Source
    parallel: Mapping[str, tuple[int, int]]  # tp, pp ...: this process's coordinate and how many there are
    placement: Placement
    shape: tuple[int, ...]
    dtype: str
    device: str
    requires_grad: bool
    quant_type: str  # what the tensor really is: fp32, bf16, nf4 ...; of a rounded copy, what it is rounded into
    label: str | None  # what it was said to be
    autocast: str | None  # what kernels computed in, where that is decided by autocast
    status: str
    statistics: Statistics | None
    file: str | None  # inside the folder of the dump
    key: str | None  # inside the file; several records may share one
    checksum: int | None  # CRC-32 of the stored bytes
    rounded_from: str | None = None  # name of the record that was rounded
    rounding: RoundingError | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def to_row(self) -> dict[str, Any]:
        """As JSON holds it."""
        nested = {name: vars(part) for name in _NESTED if (part := getattr(self, name)) is not None}
        return {**vars(self), **nested}  # asdict copies every value, at ten times the cost

    @classmethod
    def from_row(cls, row: object) -> "TensorRecord":
        """What `to_row` made, every field of its type and every name without a folder. Raises ValueError."""
        record: TensorRecord = _read_record(row)
        for field_name, name in (("name", record.name), ("file", record.file)):
            if name is not None and not is_bare(name):
                raise ValueError(f"{field_name} {name!r} is no name of a file in the dump's folder")
        sides = (*record.shape, *record.placement.global_shape, *record.placement.offset)
        if any(side < 0 for side in sides) or max(_size(record.shape), _size(record.placement.global_shape)) > _MOST:
            raise ValueError(f"shape {list(record.shape)} is none of a tensor")
        if not len(record.shape) == len(record.placement.global_shape) == len(record.placement.offset):
            raise ValueError(f"the placement of shape {list(record.shape)} has other axes")
        if record.status not in {STORED, STATISTICS, DROPPED}:
            raise ValueError(f"status {record.status!r} is none of {STORED}, {STATISTICS}, {DROPPED}")
        if record.status == STORED and None in {record.file, record.key, record.checksum}:
            raise ValueError("a stored tensor needs file, key and checksum")
        return record


def is_bare(name: str) -> bool:
    """Whether a name from a file names something in the folder itself, and nothing elsewhere."""
    return name not in {"", ".", ".."} and len(name.encode()) <= _LONGEST and not set(name) & set("/\\\0")


_MOST = 1 << 62  # size of a tensor, and of any other whole number
_LONGEST = 240  # bytes of a file's name, with an ending to come


def _size(shape: Sequence[int]) -> int:
    return prod(max(side, 1) for side in shape)


def _reader(kind: Any) -> Callable[[Any], Any]:  # noqa: ANN401, C901 - a case for each kind of annotation
    """A function that returns its argument as `kind` and raises ValueError where it is none."""
    origin, parts = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and is_dataclass(kind):
        return _dataclass_reader(kind)
    if origin is UnionType:
        inner = _reader(next(part for part in parts if part is not NoneType))
        return lambda value: None if value is None else inner(value)
    if origin is tuple:
        item, length = _reader(parts[0]), None if parts[-1] is Ellipsis else len(parts)

        def read_tuple(value: object) -> tuple[Any, ...]:
            if not isinstance(value, list) or length not in {None, len(value)}:
                raise ValueError(f"{value!r:.80} is no list of the right length")
            return tuple(map(item, value))

        return read_tuple
    if origin is Mapping:
        entry = _reader(parts[1])

        def read_mapping(value: object) -> dict[str, Any]:
            if not isinstance(value, dict):
                raise ValueError(f"{value!r:.80} is no object")
            return {name: entry(one) for name, one in value.items()}

        return read_mapping
    if kind is Any:
        return lambda value: value
    accepted = (int, float) if kind is float else (kind,)

    def read_plain(value: object) -> object:
        if type(value) not in accepted or (type(value) is int and abs(value) > _MOST):
            raise ValueError(f"{value!r:.80} is no {kind.__name__}")
        if isinstance(value, str):
            value.encode()  # half a surrogate pair is no text
        return value

    return read_plain


def _dataclass_reader(kind: type[Any]) -> Callable[[Any], Any]:
    readers = {name: _reader(hint) for name, hint in get_type_hints(kind).items()}

    def read(value: object) -> object:
        if not isinstance(value, dict) or value.keys() != readers.keys():
            raise ValueError(f"{kind.__name__} needs exactly {', '.join(readers)}")
        try:
            return kind(**{name: reader(value[name]) for name, reader in readers.items()})
        except ValueError as error:
            raise ValueError(f"{kind.__name__}: {error}") from error

    return read


_read_record = _dataclass_reader(TensorRecord)


def make_name(timestamp: str, counter: int, source: Source, quant_type: str) -> str:
    """`{timestamp}_{counter}_{layer_type}_L{layer}_{operation}_{quant_type}_{tensor_name}`.

    The counter alone is unique within a dump, over all its processes.
    """
    layer = "none" if source.layer is None else source.layer
    return f"{timestamp}_{counter}_{source.layer_type}_L{layer}_{source.direction}_{quant_type}_{source.tensor}"


def now() -> str:
    """UTC to the microsecond, without a character that file systems or the name's own parts give a meaning."""
    return datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")


FORMAT, VERSION = "tiny-onn tensor dump", 2


@dataclass(frozen=True)
class Index:
    """All that one process has written."""

    path: Path
    header: Mapping[str, Any]
    records: tuple[TensorRecord, ...]
    torn: int  # bytes of an unfinished line


class IndexFile:
    """An index being written, held by one process."""

    def __init__(self, folder: Path, rank: int, header: Mapping[str, Any]) -> None:
        """Begin the index of `rank`.

        Raises:
            ContractError: the folder holds a dump of this rank, or another process is writing one.
        """
        self.path = folder / f"index-{rank:05}.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab")
        try:
            flock(self._file, LOCK_EX | LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ContractError(
                f"another process is dumping into this folder as rank {rank}",
                where=str(self.path),
                do="give every dump a folder of its own; processes of one job need torch.distributed to tell ranks",
            ) from None
        if self._file.tell():
            self._file.close()
            raise ContractError(
                "the folder holds a dump already",
                where=str(self.path),
                do="another folder, or remove this one if nobody needs it",
            )
        self._append([{"format": FORMAT, "version": VERSION, "rank": rank, **header}])
        sync(folder)

    def add(self, records: Iterable[TensorRecord]) -> None:
        """Append rows, on the disk when this returns. Their bytes must be there already."""
        self._append([record.to_row() for record in records])

    def close(self) -> None:
        """Let go of the file and its lock."""
        self._file.close()

    def _append(self, rows: list[dict[str, Any]]) -> None:
        self._file.write(b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows))
        self._file.flush()
        os.fsync(self._file.fileno())


def read_index(path: Path) -> Index:
    """Every whole line of one process's index.

    Raises:
        ContractError: no index of a dump, of another version, or damaged.
    """
    whole, _, rest = _read_bytes(path).rpartition(b"\n")
    first, *lines = whole.split(b"\n")
    content = _parse_line(path, 1, first, lambda header: header)
    if not isinstance(content, dict) or (content.get("format"), content.get("version")) != (FORMAT, VERSION):
        raise ContractError(
            f"{path.name} is no index of a tensor dump of version {VERSION}", where=str(path), do="name a dump's folder"
        )
    if type(content.get("rank")) is not int or not 0 <= content["rank"] < _MOST:
        raise _damaged(path, "its first line names no rank")
    records = (_parse_line(path, number, line, TensorRecord.from_row) for number, line in enumerate(lines, 2))
    return Index(path, content, tuple(records), len(rest))


def _parse_line(path: Path, number: int, line: bytes, read: Callable[[Any], Any]) -> Any:  # noqa: ANN401
    try:
        return read(json.loads(line))
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"line {number}: {error}") from error


def _read_bytes(path: Path) -> bytes:
    try:
        if path.exists() and not path.is_file():
            raise ContractError(f"{path.name} is no regular file", where=str(path), do="name a dump's folder")
        return path.read_bytes()
    except OSError as error:
        raise ContractError(
            f"cannot read {path.name}: {error.strerror}", where=str(path), do="copy the file again"
        ) from error


def _damaged(path: Path, detail: str) -> ContractError:
    return ContractError(
        f"{path.name} is damaged: {detail}", where=str(path), do="copy the whole dump again, or dump again"
    )


# What a manifest says of one process, as far as the listing needs it.
_NAMES, _COUNTS = ("never_fired", "missing", "zero_gradients", "nonfinite"), ("dropped", "lost")


def read_manifest(path: Path) -> dict[str, Any]:
    """Expected against captured, by one process. Raises ContractError: damaged."""
    try:
        content = json.loads(_read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(content, dict):
        raise _damaged(path, "it is no object")
    wrong = [name for name in _NAMES if not _is_list_of_names(content.get(name))]
    wrong += [name for name in _COUNTS if type(content.get(name)) is not int]
    if wrong:
        raise _damaged(path, f"{', '.join(wrong)} missing or of another type")
    return content


def _is_list_of_names(value: object) -> bool:
    return isinstance(value, list | dict) and all(isinstance(name, str) for name in value)


# Fields of `Source` that records can be selected by.
_SOURCE = ("step", "microbatch", "call", "direction", "recompute", "module", "layer", "layer_type", "tensor")


@dataclass(frozen=True)
class Listing:
    """The indices of all processes of a dump."""

    folder: Path
    indices: tuple[Index, ...]

    @cached_property
    def records(self) -> tuple[TensorRecord, ...]:
        """All, in the order in which they were captured."""
        found = [record for index in self.indices for record in index.records]
        return tuple(sorted(found, key=lambda record: (record.counter, record.rounded_from is not None)))

    @cached_property
    def missing_files(self) -> tuple[str, ...]:
        """Files that the index names and the folder lacks."""
        named = sorted({record.file for record in self.records if record.file is not None})
        return tuple(name for name in named if not (self.folder / name).is_file())

    @property
    def torn(self) -> int:
        """Bytes at the ends of indices that killed processes left."""
        return sum(index.torn for index in self.indices)

    def manifests(self) -> dict[int, dict[str, Any]]:
        """Expected against captured, by rank; of a process that was killed there is none."""
        paths = sorted(self.folder.glob("manifest-*.json"))
        ranks = {path: re.fullmatch(r"manifest-(\d{5,18})", path.stem, re.ASCII) for path in paths}
        return {int(found[1]): read_manifest(path) for path, found in ranks.items() if found}

    def select(self, *, rounded: bool = False, **wanted: object) -> list[TensorRecord]:
        """Records whose fields have these values; a module or name may be a glob, any value a set of values.

        Args:
            rounded: the copies rounded into another number format, instead of the tensors themselves.
            wanted: step, microbatch, call, direction, recompute, module, layer, layer_type, tensor, rank, status,
                quant_type, name.
        """
        chosen = [record for record in self.records if (record.rounded_from is not None) == rounded]
        for name, value in wanted.items():
            chosen = [record for record in chosen if _fits(_value(record, name), value)]
        return chosen


def list_dump(folder: Path) -> Listing:
    """Read the indices of a dump.

    Raises:
        ContractError: there is none, or one is damaged.
    """
    paths = sorted(folder.glob("index-*.jsonl"))
    if not paths:
        raise ContractError("no tensor dump here: no index-*.jsonl", where=str(folder), do="name a dump's folder")
    return Listing(folder, tuple(read_index(path) for path in paths))


def _value(record: TensorRecord, name: str) -> object:
    return getattr(record.source if name in _SOURCE else record, name)


def _fits(value: object, wanted: object) -> bool:
    if isinstance(wanted, str) and isinstance(value, str):
        return fnmatchcase(value, wanted)
    if isinstance(wanted, set | frozenset | tuple | list | range):
        return any(_fits(value, one) for one in wanted)
    return value == wanted
