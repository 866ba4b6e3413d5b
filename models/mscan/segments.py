"""A segment: some sequences, complete in themselves, behind a header of 40 bytes."""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from models.mscan.header import ALIGNMENT, Header
from models.mscan.quantise import encode_log16
from models.mscan.rows import TOKEN_ARRAYS, Rows, StoredSequence, array_widths

MAGIC, NORMS = b"MSEG", 1
# magic, kind, zero, index in the file, sequences, tokens, bytes of payload, checksum of payload, checksum of the above
HEADER = struct.Struct("<4sHHIIQQII")
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class SegmentHeader:
    """Where a segment lies, and what is in it."""

    offset: int  # of the header, in the file
    index: int
    sequences: int
    tokens: int
    payload_length: int
    payload_checksum: int

    @property
    def payload(self) -> int:
        """Where the payload begins."""
        return self.offset + HEADER.size

    @property
    def end(self) -> int:
        """Where the next segment begins."""
        return self.payload + self.payload_length

    def pack(self) -> bytes:
        """The 40 bytes."""
        start = HEADER.pack(
            MAGIC, NORMS, 0, self.index, self.sequences, self.tokens, self.payload_length, self.payload_checksum, 0
        )[:-4]
        return start + crc32(start).to_bytes(4, "little")


@dataclass(frozen=True)
class Place:
    """Where an array lies within a payload."""

    scale: int  # bytes; log16 only
    values: int  # bytes
    shape: tuple[int, int]


def read_segment_header(file: memoryview, offset: int) -> SegmentHeader | None:
    """The header at `offset`; None where there is no whole and undamaged one."""
    start = file[offset : offset + HEADER.size]
    if len(start) < HEADER.size:
        return None
    magic, kind, _zero, index, sequences, tokens, length, payload_checksum, checksum = HEADER.unpack(start)
    if (magic, kind) != (MAGIC, NORMS) or crc32(start[:-4]) != checksum:
        return None
    return SegmentHeader(offset, index, sequences, tokens, length, payload_checksum)


def pack_table(sequences: tuple[StoredSequence, ...]) -> bytes:
    """The sequence table: its length, then JSON, column by column, padded."""
    columns = {
        name: [getattr(sequence, name) for sequence in sequences] for name in ("number", "name", "tokens", "source")
    }
    text = json.dumps(columns, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return _LENGTH.pack(len(text)) + text


def unpack_table(payload: memoryview) -> tuple[tuple[StoredSequence, ...], int]:
    """The sequence table of a payload, and how long it is."""
    (length,) = _LENGTH.unpack_from(payload)
    end = _LENGTH.size + length
    columns = json.loads(bytes(payload[_LENGTH.size : end]))
    rows = zip(columns["number"], columns["name"], columns["tokens"], columns["source"], strict=True)
    return tuple(StoredSequence(*row) for row in rows), end


def lay_out(header: Header, start: int, sequences: int, tokens: int) -> dict[str, Place]:
    """Where each array of a payload lies, `start` being where the sequence table ends."""
    places, position = {}, start
    quantised = header.encoding == "log16"
    for name, columns in array_widths(header).items():
        rows = tokens if name in TOKEN_ARRAYS else sequences
        values = position + (16 * columns if quantised else 0)
        places[name] = Place(position, values, (rows, columns))
        position = aligned(values + rows * columns * (2 if quantised else 4))
    return places


def pack_payload(header: Header, rows: Rows) -> Iterator[bytes | memoryview]:
    """The parts of a payload, one after the other."""
    yield pack_table(rows.sequences)
    for name in array_widths(header):
        values = np.ascontiguousarray(rows.arrays[name], "<f4")
        if header.encoding == "log16":
            scale, codes = encode_log16(values)
            yield _bytes_of(scale.astype("<f8", copy=False))
            stored = _bytes_of(codes.astype("<u2", copy=False))
        else:
            stored = _bytes_of(values)
        yield stored
        yield bytes(aligned(len(stored)) - len(stored))


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def aligned(position: int) -> int:
    """The next multiple of eight."""
    return position + -position % ALIGNMENT
