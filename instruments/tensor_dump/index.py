"""The index of a dump (append-only JSON lines, one per tensor), and its manifest (expected against captured)."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from instruments.errors import ContractError, some
from instruments.files import check_fields, is_count, kinds_of, write_json

# Which content was kept: the bytes, or only the statistics.
STORED, STATISTICS = "stored", "statistics"


@dataclass(frozen=True)
class Source:
    """The call that a record belongs to, and the tensor of that call."""

    step: int
    microbatch: int  # forward pass of the model within the step, from 0; evaluation has its own count
    call: int  # of the module within the microbatch, from 0
    evaluation: bool  # in a forward pass without gradients, which is not a microbatch of the training
    direction: str  # forward or backward
    module: str  # name in the model
    layer: int | None  # of the decoder, from 0; None outside it
    layer_type: str  # linear, attention, embedding ...
    tensor: str  # input, weight, grad_output, query ...


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
class TensorRecord:
    """A row of the index."""

    name: str
    counter: int
    timestamp: str
    rank: int
    source: Source
    parallel: Mapping[str, tuple[int, int]]  # tp, pp ...: this process's coordinate and the group's size
    shape: tuple[int, ...]
    dtype: str
    device: str
    requires_grad: bool
    is_leaf: bool
    quant_type: str  # real format: fp32, bf16, nf4 ...
    label: str | None  # the format that the user named
    autocast: str | None  # format of the computation under autocast
    status: str
    statistics: Statistics | None = None
    file: str | None = None  # in the folder of the dump
    key: str | None = None  # in the file; several records may share one
    checksum: int | None = None  # CRC-32 of the stored bytes
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def to_row(self) -> dict[str, Any]:
        """The record as JSON values."""
        statistics = self.statistics and vars(self.statistics)
        return {**vars(self), "source": vars(self.source), "statistics": statistics}  # asdict takes ten times as long

    @classmethod
    def from_row(cls, row: Any) -> "TensorRecord":  # noqa: ANN401
        """The inverse of `to_row`, checking field types and that names contain no folder. Raises ValueError."""
        check_fields(row, _ROW)
        values = {name: row[name] for name in _ROW}
        values["shape"] = tuple(row["shape"])
        values["parallel"] = {group: tuple(place) for group, place in row["parallel"].items()}
        for name, kind in (("source", Source), ("statistics", Statistics)):
            if (part := row[name]) is not None:
                values[name] = kind(**{one.name: part[one.name] for one in fields(kind)})
        record = cls(**values)
        _check_record(record)
        return record


_ROW = kinds_of(TensorRecord)


def _check_record(record: TensorRecord) -> None:
    for field_name, name in (("name", record.name), ("file", record.file)):
        if name is not None and not is_bare(name):
            raise ValueError(f"{field_name} {name!r} is no name of a file in the dump's folder")
    read_time(record.timestamp)
    if record.status not in {STORED, STATISTICS}:
        raise ValueError(f"status {record.status!r} is neither {STORED} nor {STATISTICS}")
    if record.status == STORED and None in {record.file, record.key, record.checksum}:
        raise ValueError("a stored tensor needs file, key and checksum")


_LONGEST = 240  # bytes of a file name, before its suffix


def is_bare(name: str) -> bool:
    """Whether a name read from a file can only name a file in the folder itself."""
    return name not in {"", ".", ".."} and len(name.encode()) <= _LONGEST and not set(name) & set("/\\\0")


def make_name(
    timestamp: str, counter: int, layer_type: str, layer: int | None, operation: str, quant_type: str, tensor: str
) -> str:
    """`{timestamp}_{counter:04}_{layer_type}_L{layer}_{operation}_{quant_type}_{tensor_name}`.

    The counter alone is unique over all processes of a dump.
    """
    number = "none" if layer is None else layer
    kind = layer_type.replace("_", "-")  # readers split names at underscores
    return f"{timestamp}_{counter:04}_{kind}_L{number}_{operation}_{quant_type}_{tensor}"


# UTC to the microsecond, without characters special in file names and without the separator of record names.
_TIME = "%Y%m%dT%H%M%S%f"


def now() -> str:
    """The timestamp of this moment."""
    return datetime.now(UTC).strftime(_TIME)


def read_time(timestamp: str) -> datetime:
    """The inverse of `now`. Raises ValueError."""
    return datetime.strptime(timestamp, _TIME).replace(tzinfo=UTC)


@dataclass
class Manifest:
    """Expected and captured tensors of one process."""

    expected: dict[str, list[str]]  # module → tensors
    unseen_weights: list[str]  # matrices outside all known kinds of modules
    steps: int = 0  # dumped steps
    captured: dict[str, dict[str, int]] = field(default_factory=dict)  # module → tensor → count
    never_fired: list[str] = field(default_factory=list)  # modules without any tensor
    missing: dict[str, list[str]] = field(default_factory=dict)  # module that ran → tensors never captured
    zero_gradients: list[str] = field(default_factory=list)  # names of records
    nonfinite: list[str] = field(default_factory=list)
    not_dumped: dict[str, dict[str, str]] = field(default_factory=dict)  # module → tensor → reason
    statistics_only: int = 0  # although bytes were requested
    lost: int = 0  # because writing failed

    def add(self, record: TensorRecord, *, bytes_wanted: bool) -> None:
        """Count a capture."""
        source, statistics = record.source, record.statistics
        times = self.captured.setdefault(source.module, {})
        times[source.tensor] = times.get(source.tensor, 0) + 1
        self.statistics_only += bytes_wanted and record.status == STATISTICS
        if statistics is not None and statistics.nonfinite:
            self.nonfinite.append(record.name)
        elif statistics is not None and statistics.all_zero and source.direction == "backward":
            self.zero_gradients.append(record.name)

    def finish(self, steps: int, *, held_back: bool = False) -> None:
        """Compare captured with expected tensors, after `steps` dumped steps.

        `held_back`: captures are written only in case of a fault, so that none may be right.
        """
        self.steps = steps
        if steps and not (held_back and not self.captured):
            self.never_fired = [name for name in self.expected if name not in {*self.captured, *self.not_dumped}]
        for name, times in self.captured.items():
            known = {*times, *self.not_dumped.get(name, ())}
            if missing := [tensor for tensor in self.expected[name] if tensor not in known]:
                self.missing[name] = missing

    def write(self, folder: Path, rank: int) -> None:
        """Write `manifest-<rank>.json`."""
        write_json(folder / f"manifest-{rank:05}.json", asdict(self))

    def complaints(self) -> Iterator[str]:
        """Problems as sentences."""
        if not self.steps:
            yield "no step was dumped: see first_step and every_steps"
        found = {
            "weights are in no known kind of layer and are not dumped": self.unseen_weights,
            "modules never fired": self.never_fired,
            "modules gave no": [f"{name}: {', '.join(tensors)}" for name, tensors in self.missing.items()],
            "modules are not dumped completely": [
                f"{name}: {', '.join(tensors)} ({', '.join(sorted(set(tensors.values())))})"
                for name, tensors in self.not_dumped.items()
            ],
            "gradients are zero everywhere": self.zero_gradients,
            "tensors hold values that are not finite": self.nonfinite,
        }
        yield from (f"{len(names)} {what}: {some(names)}" for what, names in found.items() if names)
        if self.statistics_only:
            yield f"of {self.statistics_only} tensors only statistics were kept: raise memory_mib"
        if self.lost:
            yield f"{self.lost} tensors lost to a disk that failed"


FORMAT, VERSION = "tiny-onn tensor dump", 7


def read_index(path: Path) -> tuple[int, list[TensorRecord], int]:
    """One process's rank, its records, and the number of bytes of an unfinished last line.

    Raises ContractError: another format or version, or damaged.
    """
    whole, _, rest = _read_bytes(path).rpartition(b"\n")
    first, *lines = whole.split(b"\n")
    header = _parse(path, first, "line 1: ")
    if not isinstance(header, dict) or (header.get("format"), header.get("version")) != (FORMAT, VERSION):
        raise ContractError(
            f"{path.name} is no index of a tensor dump of version {VERSION}", where=str(path), do="name a dump's folder"
        )
    if not is_count(header.get("rank")):
        raise _damaged(path, "its first line names no rank")
    records = [_parse(path, line, f"line {number}: ", TensorRecord.from_row) for number, line in enumerate(lines, 2)]
    return header["rank"], records, len(rest)


def read_manifest(path: Path) -> Manifest:
    """The manifest that one process wrote at the end of its dump. Raises ContractError: damaged."""
    content, kinds = _parse(path, _read_bytes(path)), kinds_of(Manifest)
    try:
        check_fields(content, kinds)
    except ValueError as error:
        raise _damaged(path, str(error)) from error
    return Manifest(**{name: content[name] for name in kinds})


def _parse(path: Path, text: bytes, place: str = "", read: Callable[[Any], Any] = lambda content: content) -> Any:  # noqa: ANN401
    """`read` of the JSON `text`. Raises ContractError: either is invalid."""
    try:
        return read(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"{place}{error}") from error


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
