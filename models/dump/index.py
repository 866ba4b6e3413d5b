"""The index of a dump: a file of JSON lines for each process, that only grows.

The first line says what the dump is; every other one is a `TensorRecord`, written when its bytes are on the disk. A
line without an end is what a killed process left, and is not read.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from typing import Any

from models.checkpoint.durable import sync
from models.dump.records import TensorRecord
from models.errors import ContractError

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
