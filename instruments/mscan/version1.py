"""Read .mscan version 1: one flat list of records, whose 16-bit values carry no scale.

Layout: ``<5sHII`` (magic, version 1, bytes of header and JSON together, number of records), UTF-8 JSON {model_name,
timestamp, id_to_param_name_map, sequences: [{sequence_id, num_tokens, source}]}, then records of 12 bytes. Its writer
rewrote the header on closing, by then longer than its slot, over the first records; those are gone, the others lie on a
grid that ends with the file.
"""

import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instruments.errors import ContractError

_HEADER = struct.Struct("<5sHII")
RECORD = np.dtype(
    [("token_idx", "<u4"), ("param_id", "<u2"), ("block_idx", "<u2"), ("activation", "<u2"), ("grad_norm", "<u2")]
)


@dataclass(frozen=True)
class SequenceVersion1:
    """One sequence; its tokens carry the numbers that follow those of the sequence before it."""

    number: int
    tokens: int
    source: str


@dataclass(frozen=True)
class MscanVersion1:
    """A file of version 1."""

    path: Path
    model: str
    created: str
    parameters: dict[int, str]
    sequences: tuple[SequenceVersion1, ...]
    # token_idx counts through all sequences. activation and grad_norm are codes of a scale that was not stored, cut off
    # and not rounded: a norm smaller than one step is 0.
    records: NDArray[Any]
    lost: int  # records that the header was written over, or that a cut took
    scale: None = field(default=None, init=False)
    version: int = field(default=1, init=False)


def read_version1(path: Path, file: memoryview) -> MscanVersion1:
    """Read a file whose magic and version have been checked.

    Raises:
        ContractError: the header is truncated or no JSON.
    """
    content, end, stated = _read_header(path, file)
    try:
        names = {int(number): str(name) for number, name in content.get("id_to_param_name_map", {}).items()}
        sequences = tuple(_sequence(row) for row in content.get("sequences", []))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _damaged(path, f"unreadable header ({type(error).__name__}: {error})") from error
    records = _read_records(file, end, stated, np.array(list(names), np.int64))
    model, created = str(content.get("model_name", "")), str(content.get("timestamp", ""))
    return MscanVersion1(path, model, created, names, sequences, records, stated - len(records))


def _sequence(row: dict[str, Any]) -> SequenceVersion1:
    return SequenceVersion1(int(row["sequence_id"]), int(row["num_tokens"]), str(row.get("source", "")))


def _read_header(path: Path, file: memoryview) -> tuple[dict[str, Any], int, int]:
    """The JSON, where it ends, and the number of records that should follow."""
    if len(file) < _HEADER.size:
        raise _damaged(path, f"truncated at {len(file)} bytes, in the first {_HEADER.size}")
    _magic, _version, end, stated = _HEADER.unpack_from(file)
    if not _HEADER.size <= end <= len(file):
        raise _damaged(path, f"truncated at {len(file)} bytes, in a header of {end}, or its length is wrong")
    try:
        return dict(json.loads(bytes(file[_HEADER.size : end]))), end, stated
    except (ValueError, TypeError) as error:
        raise _damaged(path, f"unreadable header ({type(error).__name__}: {error})") from error


def _read_records(file: memoryview, start: int, stated: int, known: NDArray[np.int64]) -> NDArray[Any]:
    """As many records as there are: from the header on, or counted from the end where the header lies over some."""
    there = min((len(file) - start) // RECORD.itemsize, stated)
    from_start = np.frombuffer(file, RECORD, there, start)
    if there == stated:
        return from_start
    from_end = np.frombuffer(file, RECORD, there, len(file) - there * RECORD.itemsize)
    fits = [np.isin(records["param_id"], known).sum() for records in (from_end, from_start)]
    return from_end if fits[0] >= fits[1] else from_start


def _damaged(path: Path, detail: str) -> ContractError:
    return ContractError(f"{path.name} is damaged: {detail}", where=str(path), do="copy the file again")
