"""The index of a dump, JSON lines that only grow, and what it lists."""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fcntl import LOCK_EX, LOCK_NB, flock
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from instruments.durable import sync
from instruments.errors import ContractError
from instruments.tensor_dump.records import TensorRecord

FORMAT, VERSION = "tiny-onn tensor dump", 1


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
    whole, _, rest = path.read_bytes().rpartition(b"\n")
    try:
        header, *rows = (json.loads(line) for line in whole.split(b"\n"))
    except ValueError as error:
        raise ContractError(f"{path.name} is damaged: {error}", where=str(path), do="dump again") from error
    if not isinstance(header, dict) or (header.get("format"), header.get("version")) != (FORMAT, VERSION):
        raise ContractError(
            f"{path.name} is no index of a tensor dump of version {VERSION}", where=str(path), do="name a dump's folder"
        )
    return Index(path, header, tuple(TensorRecord.from_row(row) for row in rows), len(rest))


# What records can be chosen by, beside their own fields.
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
        paths = self.folder.glob("manifest-*.json")
        return {int(path.stem.rpartition("-")[2]): json.loads(path.read_text(encoding="utf-8")) for path in paths}

    def select(self, *, rounded: bool = False, **wanted: object) -> list[TensorRecord]:
        """Records whose fields have these values; a module or name may be a glob, any value a set of values.

        Args:
            rounded: the copies rounded into another number format, instead of the tensors themselves.
            wanted: step, microbatch, call, direction, recompute, module, layer, layer_type, tensor, rank, status,
                quant_type, name.
        """
        chosen = [record for record in self.records if (record.rounded_from is not None) == rounded]
        for field, value in wanted.items():
            chosen = [record for record in chosen if _fits(_value(record, field), value)]
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


def _value(record: TensorRecord, field: str) -> object:
    return getattr(record.source if field in _SOURCE else record, field)


def _fits(value: object, wanted: object) -> bool:
    if isinstance(wanted, str) and isinstance(value, str):
        return fnmatchcase(value, wanted)
    if isinstance(wanted, set | frozenset | tuple | list | range):
        return any(_fits(value, one) for one in wanted)
    return value == wanted
