"""Read an .mscan file through a memory map; only requested values are decoded."""

import mmap
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from instruments.errors import ContractError
from instruments.parameter_scan.file_format import (
    ALIGNMENT,
    CLOSING,
    SEGMENT_HEADER,
    SEGMENT_MAGIC,
    Header,
    ParameterTable,
    Row,
    ScannedSequence,
    SegmentHeader,
    damaged,
    decode_log16,
    read_segment_header,
    refused,
    unpack_header,
    unpack_table,
)


def find_segments(path: Path, file: memoryview, start: int) -> tuple[list[SegmentHeader], bool]:
    """The sealed segments from `start`, and whether the file was closed after the last.

    A segment's header is written after its payload is on the disk: a killed writer leaves no header, and a payload that
    does not match its checksum is damaged. Raises ContractError: an unsealed segment before a sealed one, or wrong
    counts.
    """
    found: list[SegmentHeader] = []
    position, follower = start, 1  # least index by which a later segment shows that this place is damaged
    while position < len(file):
        segment = read_segment_header(file, position)
        if segment is None or segment.index != len(found) or segment.end > len(file):
            break
        position = segment.end
        if segment.kind == CLOSING:
            _check_counts(path, segment, found)
            if segment.end == len(file):
                return found, True
            follower -= 1
            break
        found.append(segment)
        follower += 1
    for match in re.finditer(re.escape(SEGMENT_MAGIC), file[position:]):
        later = read_segment_header(file, position + match.start())
        if later is not None and later.index >= follower and later.end <= len(file):
            place = f"its header, bytes {position} to {position + SEGMENT_HEADER.size}"
            raise _damaged_segment(path, follower - 1, place)
    return found, False


def _check_counts(path: Path, closing: SegmentHeader, found: list[SegmentHeader]) -> None:
    """Raise ContractError if the closing header's counts differ."""
    sequences, tokens = sum(one.sequences for one in found), sum(one.tokens for one in found)
    if (closing.sequences, closing.tokens) != (sequences, tokens):
        there = f"{sequences:,} sequences of {tokens:,} tokens are there"
        said = f"its closing header says {closing.sequences:,} of {closing.tokens:,}"
        raise damaged(path, f"{there}, {said}", f"bytes {closing.offset} to {closing.end}")


def _damaged_segment(path: Path, index: int, part: str) -> ContractError:
    return damaged(path, f"the checksum of segment {index} does not match", part)


ALL = slice(None)


class Segment:
    """Sequences of a file, and their norms."""

    def __init__(self, header: Header, payload: memoryview, place: SegmentHeader) -> None:
        """Read the sequence table; arrays stay on the disk. Raises ValueError: an invalid payload."""
        self.sequences, position = unpack_table(payload, place)
        self._payload, self._quantised = payload, header.encoding == "log16"
        # Array → its start (with log16 the start of its scales) and its shape.
        self._places: dict[str, tuple[int, tuple[int, int]]] = {}
        rows = place.sequences
        for name, columns in header.widths.items():
            self._places[name] = position, (rows, columns)
            position += 16 * columns + 2 * rows * columns if self._quantised else 4 * rows * columns
            position += -position % ALIGNMENT
        if position != len(payload):
            raise ValueError(f"arrays end at byte {position} of {len(payload)}")

    def array(self, name: str, rows: slice = ALL, columns: slice = ALL) -> NDArray[np.float32]:
        """Norms as float32, NaN where not measured; a view of the file if nothing needs decoding.

        `rows` are sequences; `columns` are parameters, input blocks or output blocks.
        """
        start, shape = self._places[name]
        if not self._quantised:
            return self._view(start, shape, "<f4")[rows][:, columns]
        codes = self._view(start + 16 * shape[1], shape, "<u2")[rows][:, columns]
        return decode_log16(self.scale(name)[:, columns], codes)

    def scale(self, name: str) -> NDArray[np.float64]:
        """(2, columns) offset and step of every column of a log16 array."""
        start, (_rows, columns) = self._places[name]
        return self._view(start, (2, columns), "<f8")

    def row(self, number: int) -> Row:
        """The `number`-th sequence of the segment with all its norms."""
        return self.sequences[number], {name: self.array(name, slice(number, number + 1))[0] for name in self._places}

    def _view(self, start: int, shape: tuple[int, int], stored: str) -> NDArray[Any]:
        return np.frombuffer(self._payload, stored, shape[0] * shape[1], start).reshape(shape)


@dataclass(frozen=True)
class Mscan:
    """A file that was read: S sequences in file order, P parameters in table order."""

    path: Path
    header: Header
    segments: tuple[Segment, ...]
    end: int  # bytes of header and sealed segments
    torn: int  # bytes after them, left unsealed by a killed writer; never read
    closed: bool  # False: the writer was killed or is still running, or the end is lost; sequences may be missing

    @property
    def parameters(self) -> ParameterTable:
        """The parameter table."""
        return self.header.table

    @cached_property
    def sequences(self) -> list[ScannedSequence]:
        """The sequences of all segments."""
        return [sequence for segment in self.segments for sequence in segment.sequences]

    def activation(self) -> NDArray[np.float32]:
        """(S, P) norm of each weight's input."""
        return self._stacked("activation")

    def gradient(self) -> NDArray[np.float32]:
        """(S, P) norm of the loss's gradient with respect to each weight."""
        return self._stacked("gradient")

    def input_blocks(self, name: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """(S, blocks) activation and gradient of one weight's input blocks. Raises ContractError: no such weight."""
        columns = self.parameters.input_columns[self.parameters.index(name)]
        return self._stacked("in_activation", columns), self._stacked("in_gradient", columns)

    def output_blocks(self, name: str) -> NDArray[np.float32]:
        """(S, blocks) gradient of one weight's output blocks. Raises ContractError: no such weight."""
        return self._stacked("out_gradient", self.parameters.output_columns[self.parameters.index(name)])

    def _stacked(self, name: str, columns: slice = ALL) -> NDArray[np.float32]:
        none = np.empty((0, self.header.widths[name]), np.float32)[:, columns]
        return np.concatenate([none, *(segment.array(name, columns=columns) for segment in self.segments)])


def read_mscan(path: Path | str, *, verify: bool = True) -> Mscan:
    """Open a file; `verify` reads everything once to compare checksums, otherwise only headers are checked.

    Raises ContractError: missing, not an .mscan file, of another version, or damaged. A file that was not closed is no
    error: see `closed` and `torn`.
    """
    path = Path(path)
    file = _map(path)
    header, start = unpack_header(path, file)
    places, closed = find_segments(path, file, start)
    opened = []
    for place in places:
        where, payload = f"its payload, bytes {place.payload} to {place.end}", file[place.payload : place.end]
        if verify and crc32(payload) != place.payload_checksum:
            raise _damaged_segment(path, place.index, where)
        try:
            opened.append(Segment(header, payload, place))
        except (ValueError, RecursionError) as error:
            raise damaged(path, f"segment {place.index} is invalid: {error}", where) from error
    end = places[-1].end if places else start
    return Mscan(path, header, tuple(opened), end, 0 if closed else len(file) - end, closed)


def _map(path: Path) -> memoryview:
    """The file's bytes as a memory map, which exists as long as any view of it."""
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise refused(path, f"{path.name} is no regular file", "name a file that the scanner wrote")
        with path.open("rb") as file:
            if not path.stat().st_size:
                return memoryview(b"")
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        what = f"cannot read {path.name}: {error.strerror}"
        raise refused(path, what, "name a file that the scanner wrote") from error
