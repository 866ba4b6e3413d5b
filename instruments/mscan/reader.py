"""Read an .mscan file through a memory map: what is not asked for is not decoded."""

import mmap
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TypeVar
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from instruments.errors import ContractError
from instruments.mscan.header import START, Header, ParameterTable, read_version, unpack_header
from instruments.mscan.rows import TOKEN_ARRAYS, Rows, StoredSequence, array_widths
from instruments.mscan.segments import (
    HEADER,
    MAGIC,
    SegmentHeader,
    decode_log16,
    error_bound,
    lay_out,
    read_segment_header,
    unpack_table,
)
from instruments.mscan.version1 import MscanVersion1, read_version1


@dataclass(frozen=True)
class Sealed:
    """The sealed segments in order; `end` is where they end, `torn` how many bytes of unfinished work follow."""

    segments: tuple[SegmentHeader, ...]
    end: int
    torn: int


def find_segments(path: Path, file: memoryview, start: int) -> Sealed:
    """Walk the segments from `start`; a segment that no sealed one follows is a torn tail.

    A segment's header is written only after its payload has reached the disk, so that a writer that was killed
    leaves no header, and a header whose payload does not match its checksum means damage.

    Raises:
        ContractError: a damaged header among sealed segments.
    """
    segments: list[SegmentHeader] = []
    position = start
    while position < len(file):
        segment = read_segment_header(file, position)
        if segment is None or segment.index != len(segments) or segment.end > len(file):
            _check_nothing_follows(path, file, position, len(segments))
            break
        segments.append(segment)
        position = segment.end
    return Sealed(tuple(segments), position, len(file) - position)


def check_payload(path: Path, file: memoryview, segment: SegmentHeader) -> None:
    """Raise ContractError where a payload is not what was written."""
    if crc32(file[segment.payload : segment.end]) != segment.payload_checksum:
        raise _damaged(path, segment.index, f"its payload, bytes {segment.payload} to {segment.end}")


def _check_nothing_follows(path: Path, file: memoryview, position: int, index: int) -> None:
    """Raise ContractError where a later segment is sealed."""
    for found in re.finditer(re.escape(MAGIC), file[position:]):
        later = read_segment_header(file, position + found.start())
        if later is not None and later.index > index and later.end <= len(file):
            raise _damaged(path, index, f"its header, bytes {position} to {position + HEADER.size}")


def _damaged(path: Path, index: int, part: str) -> ContractError:
    return ContractError(
        f"{path.name} is damaged: the checksum of segment {index} does not match",
        where=f"{path}, {part}",
        do="copy the file again, or scan again",
    )


ALL = slice(None)
Columns = slice | NDArray[np.intp]
Number = TypeVar("Number", np.float32, np.float64, np.uint16)


class Segment:
    """Some sequences of a file, and their norms."""

    def __init__(self, header: Header, payload: memoryview, place: SegmentHeader) -> None:
        """Read the sequence table; arrays stay on the disk."""
        self.header = header
        self.sequences, start = unpack_table(payload)
        self._payload = payload
        self._places = lay_out(header, start, place.sequences, place.tokens)

    def array(self, name: str, rows: Columns = ALL, columns: Columns = ALL) -> NDArray[np.float32]:
        """Norms as float32, NaN where nothing was measured; a view of the file where nothing needs decoding.

        Args:
            name: activation, gradient, in_activation, in_gradient, out_gradient, token_activation or token_gradient.
            rows: of sequences, or of tokens.
            columns: of parameters, input blocks or output blocks.
        """
        place = self._places[name]
        if self.header.encoding == "f32":
            return self._view(place.values, place.shape, np.float32)[rows][:, columns]
        codes = self._view(place.values, place.shape, np.uint16)[rows][:, columns]
        return decode_log16(self.scale(name)[:, columns], codes)

    def scale(self, name: str) -> NDArray[np.float64]:
        """(2, columns) offset and step of every column of a log16 array."""
        place = self._places[name]
        return self._view(place.scale, (2, place.shape[1]), np.float64)

    def rows(self, picked: NDArray[np.intp]) -> Rows:
        """Some sequences with all their norms."""
        first = self._first_tokens
        tokens = np.concatenate([np.arange(first[row], first[row + 1]) for row in picked])
        arrays = {name: self.array(name, tokens if name in TOKEN_ARRAYS else picked) for name in self._places}
        return Rows(tuple(self.sequences[row] for row in picked), arrays)

    @cached_property
    def _first_tokens(self) -> list[int]:
        """Row of each sequence's first token, and the number of tokens."""
        return [0, *accumulate(sequence.tokens for sequence in self.sequences)]

    def _view(self, start: int, shape: tuple[int, int], number_format: type[Number]) -> NDArray[Number]:
        stored = np.dtype(number_format).newbyteorder("<")
        return np.frombuffer(self._payload, stored, shape[0] * shape[1], start).reshape(shape)


@dataclass(frozen=True)
class Mscan:
    """A file of version 2. S sequences in the order of the file, P parameters in the order of the table."""

    path: Path
    header: Header
    segments: tuple[Segment, ...]
    end: int  # bytes of header and sealed segments
    torn: int  # bytes after them: what a killed writer had not sealed; never read
    version: int = field(default=2, init=False)

    @property
    def parameters(self) -> ParameterTable:
        """The parameter table."""
        return self.header.table

    @cached_property
    def sequences(self) -> list[StoredSequence]:
        """The sequence tables of all segments."""
        return [sequence for segment in self.segments for sequence in segment.sequences]

    def activation(self) -> NDArray[np.float32]:
        """(S, P) norm of each weight's direct input."""
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

    def tokens(self, sequence: int | str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """(T, P) activation and gradient contribution at each token of the sequence with this number or name.

        ‖x_t‖·‖δ_t‖ is the norm of what position t contributes to the weight's gradient; it is not the gradient of
        token t's own loss.

        Raises:
            ContractError: no such sequence, or the file keeps no tokens.
        """
        if not self.header.per_token:
            raise ContractError(
                f"{self.path.name} holds no values per token", where=str(self.path), do="scan again with per_token=True"
            )
        segment, row = self._locate(sequence)
        rows = segment.rows(np.array([row]))
        return rows.arrays["token_activation"], rows.arrays["token_gradient"]

    def select(self, sequence: int | str) -> Rows:
        """One sequence, by its number or its name, with all its norms. Raises ContractError: no such sequence."""
        segment, row = self._locate(sequence)
        return segment.rows(np.array([row]))

    def error_bound(self, name: str) -> NDArray[np.float64]:
        """(columns,) largest relative error of an array's values as stored; 0 where they are stored in full."""
        bound = np.zeros(array_widths(self.header)[name])
        if self.header.encoding == "log16":
            for segment in self.segments:
                np.maximum(bound, error_bound(segment.scale(name)), out=bound)
        return bound

    def blocks_of_rows(self, size: int) -> Iterator[Rows]:
        """All sequences in the order of the file, at most `size` at a time."""
        for segment in self.segments:
            for start in range(0, len(segment.sequences), size):
                yield segment.rows(np.arange(start, min(start + size, len(segment.sequences))))

    def _stacked(self, name: str, columns: slice = ALL) -> NDArray[np.float32]:
        if not self.segments:
            return np.empty((0, len(range(*columns.indices(array_widths(self.header)[name])))), np.float32)
        return np.concatenate([segment.array(name, columns=columns) for segment in self.segments])

    def _locate(self, wanted: int | str) -> tuple[Segment, int]:
        for segment in self.segments:
            for row, sequence in enumerate(segment.sequences):
                if wanted in {sequence.number, sequence.name}:
                    return segment, row
        known = f"number {self.sequences[0].number} or name {self.sequences[0].name!r}" if self.sequences else ""
        raise ContractError(
            f"no sequence {wanted!r}; there are {len(self.sequences)}",
            where=str(self.path),
            do=f"ask for one of them, such as {known}" if known else "scan some text into the file",
        )


def read_mscan(path: Path, *, verify: bool = True) -> Mscan | MscanVersion1:
    """Open a file of version 1 or 2.

    Args:
        path: the file.
        verify: read everything once to compare checksums; otherwise only headers are checked.

    Raises:
        ContractError: missing, no .mscan file, of another version, or damaged. A torn tail is no error: `torn` says how
            long it is.
    """
    file = _map(path)
    if read_version(path, bytes(file[: START.size])) == 1:
        return read_version1(path, file)
    header, start = unpack_header(path, file)
    sealed = find_segments(path, file, start)
    if verify:
        for segment in sealed.segments:
            check_payload(path, file, segment)
    return Mscan(path, header, _open_segments(header, file, sealed), sealed.end, sealed.torn)


def _open_segments(header: Header, file: memoryview, sealed: Sealed) -> tuple[Segment, ...]:
    return tuple(Segment(header, file[place.payload : place.end], place) for place in sealed.segments)


def _map(path: Path) -> memoryview:
    """The file's bytes, read when they are looked at; the map lives as long as any view of it."""
    try:
        with path.open("rb") as file:
            if not path.stat().st_size:
                return memoryview(b"")
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise ContractError(
            f"cannot read {path.name}: {error.strerror}", where=str(path), do="name a file that the scanner wrote"
        ) from error
