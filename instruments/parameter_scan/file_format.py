"""The bytes of an .mscan file (SPECIFICATION.md): header with the parameter table, and segments of sequences."""

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from math import ceil
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from instruments.errors import ContractError, some
from instruments.files import check_fields, is_anything, is_count, is_text, kinds_of, list_of, object_of
from instruments.shapes import Float32, Float64, UInt16

MAGIC, VERSION = b"MSCAN", 3
ENCODINGS = ("f32", "log16")
ALIGNMENT = 8  # bytes; every array begins at a multiple of it
PREAMBLE = struct.Struct("<5sHBII")  # magic, version, flags, bytes of JSON, checksum
MAX_FEATURES, MAX_BLOCKS = 1 << 31, 1 << 24  # limits of a valid file
ARRAYS = ("activation", "gradient", "in_activation", "in_gradient", "out_gradient")  # one row per sequence

_CONTENT = {
    "model": is_text, "created": is_text, "block_width": is_count, "encoding": is_text,
    "per_token": lambda value: value is False,  # files of earlier releases may have values per token
    "metadata": object_of(is_anything), "parameters": list_of(is_anything),
}  # fmt: skip


@dataclass(frozen=True)
class WatchedParameter:
    """One watched weight, (out_features, in_features), and its blocks.

    Input block i holds columns i·width to (i+1)·width of the weight, output block o the same rows; the last may be
    narrower. Where the outputs of an attention layer are heads (or the inputs, for its output projection), a block is a
    head. An embedding (V, D) has no input blocks, because rows are looked up, and its output blocks are blocks of D.
    For a Conv1D, whose weight is stored as (in_features, out_features), columns and rows are exchanged.
    """

    name: str  # model.layers.0.self_attn.q_proj.weight; of a fused expert: ...mlp.experts.3.gate_up_proj
    kind: str  # linear or embedding
    in_features: int
    out_features: int
    block_width: int
    in_head: int | None = None  # width of a head if inputs are heads
    out_head: int | None = None

    @property
    def in_width(self) -> int:
        """Columns of an input block."""
        return self.in_head or self.block_width

    @property
    def out_width(self) -> int:
        """Rows of an output block."""
        return self.out_head or self.block_width

    @property
    def in_blocks(self) -> int:
        """Number of input blocks."""
        return 0 if self.kind == "embedding" else ceil(self.in_features / self.in_width)

    @property
    def out_blocks(self) -> int:
        """Number of output blocks."""
        return ceil(self.out_features / self.out_width)


@dataclass(frozen=True)
class ParameterTable:
    """P weights in column order; I input blocks and O output blocks, concatenated over the weights."""

    entries: tuple[WatchedParameter, ...]
    block_width: int

    @property
    def names(self) -> list[str]:
        """Names in column order."""
        return [entry.name for entry in self.entries]

    @cached_property
    def input_columns(self) -> list[slice]:
        """Columns of each weight's input blocks."""
        return _columns(entry.in_blocks for entry in self.entries)

    @cached_property
    def output_columns(self) -> list[slice]:
        """Columns of each weight's output blocks."""
        return _columns(entry.out_blocks for entry in self.entries)

    @cached_property
    def widths(self) -> tuple[int, int, int]:
        """P, I and O."""
        blocks = [(entry.in_blocks, entry.out_blocks) for entry in self.entries]
        return len(blocks), sum(inputs for inputs, _ in blocks), sum(outputs for _, outputs in blocks)

    def index(self, name: str) -> int:
        """Column of the weight `name`. Raises ContractError."""
        if name in self.names:
            return self.names.index(name)
        what = f"no parameter {name}; there are {some(self.names, 3)}"
        raise ContractError(what, where="parameter table of the .mscan file", do="python -m pipeline mscan FILE")


def _columns(blocks: Iterable[int]) -> list[slice]:
    return [slice(start, stop) for start, stop in pairwise(accumulate(blocks, initial=0))]


@dataclass(frozen=True)
class Header:
    """Values that all segments share."""

    model: str
    created: str  # ISO 8601
    table: ParameterTable
    encoding: str = "log16"
    metadata: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def widths(self) -> dict[str, int]:
        """Array name → number of columns, in file order."""
        parameters, inputs, outputs = self.table.widths
        return dict(zip(ARRAYS, (parameters, parameters, inputs, inputs, outputs), strict=True))

    def content(self) -> dict[str, Any]:
        """The header as JSON values."""
        parameters = [
            (one.name, one.kind, one.in_features, one.out_features, one.in_head, one.out_head)
            for one in self.table.entries
        ]
        facts = {name: value for name, value in vars(self).items() if name in _CONTENT}
        return facts | {"block_width": self.table.block_width, "per_token": False, "parameters": parameters}

    def differences(self, other: "Header") -> list[str]:
        """Keys whose values differ and so prevent combining two files; date and metadata may differ."""
        mine, theirs = self.content(), other.content()
        return [name for name in mine if name not in {"created", "metadata"} and mine[name] != theirs[name]]

    def pack(self) -> bytes:
        """Preamble and padded JSON; equal headers give equal bytes."""
        text = json.dumps(self.content(), sort_keys=True, separators=(",", ":")).encode()
        text += b" " * (-(PREAMBLE.size + len(text)) % ALIGNMENT)
        start = PREAMBLE.pack(MAGIC, VERSION, 0, len(text), 0)[:-4]
        return start + crc32(text, crc32(start)).to_bytes(4, "little") + text


def refused(path: Path, what: str, do: str) -> ContractError:
    """The error of an unusable file."""
    return ContractError(what, where=str(path), do=do)


def damaged(path: Path, detail: str, where: str = "") -> ContractError:
    """The error of a damaged file; `where` is the place in the file."""
    place = f"{path}, {where}" if where else str(path)
    return ContractError(f"{path.name} is damaged: {detail}", where=place, do="copy the file again, or scan again")


def unpack_header(path: Path, file: memoryview) -> tuple[Header, int]:
    """The header, and the offset of the first segment. Raises ContractError: damaged, or another format or version."""
    magic = bytes(file[: len(MAGIC)])
    if magic != MAGIC[: len(file)]:
        what = f"{path.name} is no .mscan file: it begins with {magic!r}, not {MAGIC!r}"
        raise refused(path, what, "name a file that the scanner wrote")
    if len(file) < PREAMBLE.size:
        raise damaged(path, f"truncated at {len(file)} bytes, in the first {PREAMBLE.size}")
    _magic, version, _flags, length, checksum = PREAMBLE.unpack_from(file)
    if version != VERSION:
        what = f"{path.name} is of .mscan version {version}; {VERSION} is known here"
        raise refused(path, what, "read it with the release that wrote it, or scan again")
    end = PREAMBLE.size + length
    if len(file) < end:
        raise damaged(path, f"truncated at {len(file)} bytes, in a header of {end}, or its length is wrong")
    text = file[PREAMBLE.size : end]
    if crc32(text, crc32(file[: PREAMBLE.size - 4])) != checksum:
        raise damaged(path, f"checksum of the header (bytes 0 to {end}) does not match")
    try:
        return _read_content(json.loads(bytes(text))), end
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"the header is invalid: {error}") from error


def _read_content(content: Any) -> Header:  # noqa: ANN401 - any JSON
    """The header from its JSON, which may be invalid despite a matching checksum. Raises ValueError."""
    check_fields(content, _CONTENT)
    model, created, width, encoding, _per_token, metadata, entries = (content[name] for name in _CONTENT)
    if encoding not in ENCODINGS:
        raise ValueError(f"encoding is none of {', '.join(ENCODINGS)}")
    if not 1 <= width <= MAX_FEATURES:
        raise ValueError(f"block_width is not between 1 and {MAX_FEATURES}")
    table = ParameterTable(tuple(_read_entry(entry, width) for entry in entries), width)
    if sum(table.widths) > MAX_BLOCKS:
        raise ValueError(f"its parameters have more than {MAX_BLOCKS} blocks")
    return Header(model, created, table, encoding, metadata)


def _read_entry(entry: Any, width: int) -> WatchedParameter:  # noqa: ANN401 - any JSON
    match entry:
        case [name, "linear" | "embedding" as kind, inputs, outputs, in_head, out_head] if is_text(name):
            heads = [head for head in (in_head, out_head) if head is not None]
            if all(type(size) is int and 1 <= size <= MAX_FEATURES for size in (inputs, outputs, *heads)):
                return WatchedParameter(name, kind, inputs, outputs, width, in_head, out_head)
    what = "[name, linear or embedding, in_features, out_features, in_head, out_head]"
    raise ValueError(f"parameter {entry!s:.200} is not {what} of 1 to {MAX_FEATURES}")


@dataclass(frozen=True)
class ScannedSequence:
    """One sample; its number in the whole scan, which a writer gives it, is unique within a file."""

    name: str
    tokens: int
    source: str = ""
    number: int = 0


# A sequence, and its norms by name of the array: (P,), (I,) or (O,) float32.
Row = tuple[ScannedSequence, dict[str, NDArray[np.float32]]]

# log16: 16-bit codes on each column's own logarithmic scale.
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


def _scale(values_RC: Float32[np.ndarray, "R C"]) -> Float64[np.ndarray, "2 C"]:
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


def _row_chunks(shape: tuple[int, ...]) -> Iterator[slice]:
    step = max(1, ELEMENTS_AT_ONCE // max(1, shape[1]))
    return (slice(start, start + step) for start in range(0, shape[0], step))


SEGMENT_MAGIC = b"MSEG"
NORMS, CLOSING = 1, 2  # kinds: sequences; closing header
# magic, kind, zero, index in the file, sequences, tokens, bytes of payload, checksum of payload, checksum of the above
SEGMENT_HEADER = struct.Struct("<4sHHIIQQII")
_LENGTH = struct.Struct("<Q")
_TABLE = kinds_of(ScannedSequence)  # columns of the sequence table


@dataclass(frozen=True)
class SegmentHeader:
    """Offset and sizes of a segment."""

    offset: int  # of the header, in the file
    index: int
    sequences: int
    tokens: int
    payload_length: int = 0
    payload_checksum: int = 0
    kind: int = NORMS

    @property
    def payload(self) -> int:
        """Offset of the payload."""
        return self.offset + SEGMENT_HEADER.size

    @property
    def end(self) -> int:
        """Offset of the next segment."""
        return self.payload + self.payload_length

    def pack(self) -> bytes:
        """The header's 40 bytes."""
        _offset, *counts, kind = vars(self).values()
        start = SEGMENT_HEADER.pack(SEGMENT_MAGIC, kind, 0, *counts, 0)[:-4]
        return start + crc32(start).to_bytes(4, "little")


def read_segment_header(file: memoryview, offset: int) -> SegmentHeader | None:
    """The header at `offset`; None if it is incomplete or damaged."""
    start = file[offset : offset + SEGMENT_HEADER.size]
    if len(start) < SEGMENT_HEADER.size:
        return None
    magic, kind, _zero, index, sequences, tokens, length, payload_checksum, checksum = SEGMENT_HEADER.unpack(start)
    if magic != SEGMENT_MAGIC or kind not in {NORMS, CLOSING} or crc32(start[:-4]) != checksum:
        return None
    return SegmentHeader(offset, index, sequences, tokens, length, payload_checksum, kind)


def pack_payload(header: Header, rows: Sequence[Row]) -> Iterator[bytes | memoryview]:
    """The consecutive parts of a payload: the sequence table, its JSON padded, and the arrays."""
    columns = {name: [getattr(sequence, name) for sequence, _arrays in rows] for name in _TABLE}
    text = json.dumps(columns, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    yield _LENGTH.pack(len(text)) + text
    for name in header.widths:
        values: NDArray[Any] = np.stack([arrays[name] for _sequence, arrays in rows]).astype("<f4", copy=False)
        if header.encoding == "log16":
            scale, codes = encode_log16(values)
            yield _bytes_of(scale.astype("<f8", copy=False))
            values = codes.astype("<u2", copy=False)
        yield _bytes_of(values)
        yield bytes(-values.nbytes % ALIGNMENT)


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def unpack_table(payload: memoryview, segment: SegmentHeader) -> tuple[tuple[ScannedSequence, ...], int]:
    """The sequence table of a payload, and its size. Raises ValueError: invalid, or unlike the segment's header."""
    if len(payload) < _LENGTH.size:
        raise ValueError("no sequence table")
    end = _LENGTH.size + _LENGTH.unpack_from(payload)[0]
    if end > len(payload):
        raise ValueError(f"a sequence table of {end - _LENGTH.size} bytes")
    columns = json.loads(bytes(payload[_LENGTH.size : end]))
    check_fields(columns, {name: list_of(kind, segment.sequences) for name, kind in _TABLE.items()})
    if sum(columns["tokens"]) != segment.tokens:
        raise ValueError(f"{sum(columns['tokens'])} tokens where the segment's header says {segment.tokens}")
    return tuple(map(ScannedSequence, *(columns[name] for name in _TABLE))), end
