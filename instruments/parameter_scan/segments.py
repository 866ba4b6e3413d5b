"""A segment: a header of 40 bytes and a self-contained payload of sequences."""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np
from jaxtyping import Float32, Float64, UInt16
from numpy.typing import NDArray

from instruments.json_kinds import check_fields, kinds_of, list_of
from instruments.parameter_scan.header import ALIGNMENT, Header, Rows, StoredSequence, array_widths

NOT_MEASURED = 65535
LAST = 65534  # code of a column's largest value
ELEMENTS_AT_ONCE = 1 << 17  # float64 temporaries of this size stay in the cache


def encode_log16(values_RC: Float32[np.ndarray, "R C"]) -> tuple[Float64[np.ndarray, "2 C"], UInt16[np.ndarray, "R C"]]:
    """Quantise norms, >= 0, finite or NaN (not measured), column by column.

    Returns:
        ``(2, C)`` offset and step of each column, and ``(R, C)`` codes.
    Numerics: float64 logarithms, rounded half to even. A column with one value has step 0 and is exact in fp32.
    """
    scale_2C = _scale(values_RC)
    offset_C, step_C = scale_2C
    divisor_C = np.where(step_C > 0, step_C, 1.0)
    codes_RC = np.empty(values_RC.shape, np.uint16)
    for rows in _row_chunks(values_RC.shape):
        values = values_RC[rows]
        positive = values > 0
        codes = np.log(values, where=positive, out=np.repeat(offset_C[None], len(values), 0), dtype=np.float64)
        codes -= offset_C
        codes /= divisor_C
        np.rint(codes, out=codes)
        codes += 1
        np.clip(codes, 1, LAST, out=codes)
        codes *= positive
        codes[np.isnan(values)] = NOT_MEASURED
        codes_RC[rows] = codes
    return scale_2C, codes_RC


def decode_log16(
    scale_2C: Float64[np.ndarray, "2 C"], codes_RC: UInt16[np.ndarray, "R C"]
) -> Float32[np.ndarray, "R C"]:
    """Norms from their codes: ``(R, C)`` fp32, NaN where not measured.

    Numerics: float64, rounded to fp32 once at the end (adds at most 2^-24, 6e-8, of the value).
    """
    offset_C, step_C = scale_2C
    values_RC = np.empty(codes_RC.shape, np.float32)
    for rows in _row_chunks(codes_RC.shape):
        codes = codes_RC[rows]
        values = (codes - 1.0) * step_C
        values += offset_C
        # Reserved codes may overflow with large scales, and so may scales of a damaged file.
        with np.errstate(over="ignore", invalid="ignore"):
            np.exp(values, where=(codes > 0) & (codes < NOT_MEASURED), out=values)
        values[codes == 0] = 0
        values[codes == NOT_MEASURED] = np.nan
        values_RC[rows] = values
    return values_RC


def error_bound(scale_2C: Float64[np.ndarray, "2 C"]) -> Float64[np.ndarray, "C"]:
    """``(C,)`` largest relative error of each column."""
    with np.errstate(over="ignore", invalid="ignore"):  # scales of a damaged file
        return np.asarray(np.expm1(scale_2C[1] / 2))


def _scale(values_RC: NDArray[np.float32]) -> NDArray[np.float64]:
    """Offset and step. The logarithm is monotone, so only the extremes need it."""
    columns = values_RC.shape[1]
    low_C, high_C = np.full(columns, np.inf, np.float32), np.zeros(columns, np.float32)
    for rows in _row_chunks(values_RC.shape):
        values = values_RC[rows]
        np.minimum(low_C, np.where(values > 0, values, np.float32(np.inf)).min(0), out=low_C)
        np.fmax(high_C, np.fmax.reduce(values, axis=0), out=high_C)
    empty_C = high_C == 0
    low_C[empty_C] = high_C[empty_C] = 1
    offset_C, top_C = np.log(low_C, dtype=np.float64), np.log(high_C, dtype=np.float64)
    return np.stack([offset_C, (top_C - offset_C) / (LAST - 1)])


def _row_chunks(shape: tuple[int, ...]) -> list[slice]:
    step = max(1, ELEMENTS_AT_ONCE // max(1, shape[1]))
    return [slice(start, start + step) for start in range(0, shape[0], step)]


MAGIC = b"MSEG"
NORMS, CLOSING = 1, 2  # kinds: sequences; closing header
# magic, kind, zero, index in the file, sequences, tokens, bytes of payload, checksum of payload, checksum of the above
HEADER = struct.Struct("<4sHHIIQQII")
_LENGTH = struct.Struct("<Q")
_TABLE = kinds_of(StoredSequence)  # columns of the sequence table


@dataclass(frozen=True)
class SegmentHeader:
    """Offset and sizes of a segment."""

    offset: int  # of the header, in the file
    index: int
    sequences: int
    tokens: int
    payload_length: int
    payload_checksum: int
    kind: int = NORMS

    @property
    def payload(self) -> int:
        """Offset of the payload."""
        return self.offset + HEADER.size

    @property
    def end(self) -> int:
        """Offset of the next segment."""
        return self.payload + self.payload_length

    def pack(self) -> bytes:
        """The header's 40 bytes."""
        start = HEADER.pack(
            MAGIC, self.kind, 0, self.index, self.sequences, self.tokens, self.payload_length, self.payload_checksum, 0
        )[:-4]
        return start + crc32(start).to_bytes(4, "little")


def read_segment_header(file: memoryview, offset: int) -> SegmentHeader | None:
    """The header at `offset`; None if it is incomplete or damaged."""
    start = file[offset : offset + HEADER.size]
    if len(start) < HEADER.size:
        return None
    magic, kind, _zero, index, sequences, tokens, length, payload_checksum, checksum = HEADER.unpack(start)
    if magic != MAGIC or kind not in {NORMS, CLOSING} or crc32(start[:-4]) != checksum:
        return None
    return SegmentHeader(offset, index, sequences, tokens, length, payload_checksum, kind)


def pack_table(sequences: tuple[StoredSequence, ...]) -> bytes:
    """The sequence table: its length, then padded JSON, column by column."""
    columns = {name: [getattr(sequence, name) for sequence in sequences] for name in _TABLE}
    text = json.dumps(columns, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return _LENGTH.pack(len(text)) + text


def unpack_table(payload: memoryview, segment: SegmentHeader) -> tuple[tuple[StoredSequence, ...], int]:
    """The sequence table of a payload, and its size. Raises ValueError: invalid, or unlike the segment's header."""
    if len(payload) < _LENGTH.size:
        raise ValueError("no sequence table")
    (length,) = _LENGTH.unpack_from(payload)
    end = _LENGTH.size + length
    if end > len(payload):
        raise ValueError(f"a sequence table of {length} bytes")
    columns = json.loads(bytes(payload[_LENGTH.size : end]))
    check_fields(columns, {name: list_of(kind, segment.sequences) for name, kind in _TABLE.items()})
    if sum(columns["tokens"]) != segment.tokens:
        raise ValueError(f"{sum(columns['tokens'])} tokens where the segment's header says {segment.tokens}")
    return tuple(map(StoredSequence, *(columns[name] for name in _TABLE))), end


def pack_payload(header: Header, rows: Rows) -> Iterator[bytes | memoryview]:
    """The consecutive parts of a payload."""
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
    """The next multiple of 8."""
    return position + -position % ALIGNMENT
