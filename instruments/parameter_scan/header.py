"""The header of a file (scan, parameter table, encoding), and rows of sequences."""

import json
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property
from itertools import accumulate, pairwise
from math import ceil
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from instruments.errors import ContractError
from instruments.json_kinds import check_fields, is_anything, is_count, is_flag, is_text, list_of, object_of


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

    @classmethod
    def of(cls, parameters: Iterable[WatchedParameter], block_width: int) -> "ParameterTable":
        """The table of a scanner's parameters."""
        return cls(tuple(replace(parameter, block_width=block_width) for parameter in parameters), block_width)

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
        return (
            len(self.entries),
            sum(one.in_blocks for one in self.entries),
            sum(one.out_blocks for one in self.entries),
        )

    def index(self, name: str) -> int:
        """Column of the weight `name`. Raises ContractError."""
        if name in self.names:
            return self.names.index(name)
        near = get_close_matches(name, self.names, n=1, cutoff=0.0)
        what = f"no parameter {name}; there are {len(self.entries)}"
        do = f"say {near[0]}" if near else "scan a model that has one"
        raise ContractError(what, where="parameter table of the .mscan file", do=do)


def _columns(blocks: Iterable[int]) -> list[slice]:
    return [slice(start, stop) for start, stop in pairwise(accumulate(blocks, initial=0))]


_NUMBERED = re.compile(r"\.(\d+)\.(.+)")


def locate(name: str) -> tuple[int | None, str]:
    """Layer and module of a weight: model.layers.3.self_attn.q_proj.weight is (3, self_attn.q_proj)."""
    module = name.removesuffix(".weight")
    numbered = _NUMBERED.search(module)
    if numbered is None:
        return None, module.rpartition(".")[2]
    return int(numbered[1]), numbered[2]


def module_of(name: str) -> str:
    """Full name of a weight's module, with * for the layer: decoder.block.*.layer.0.SelfAttention.q."""
    return _NUMBERED.sub(r".*.\2", name.removesuffix(".weight"), count=1)


MAGIC, VERSION = b"MSCAN", 3
ENCODINGS = ("f32", "log16")
ALIGNMENT = 8  # bytes; every array begins at a multiple of it
_START = struct.Struct("<5sH")  # magic and version
PREAMBLE = struct.Struct("<5sHBII")  # magic, version, flags, bytes of JSON, checksum

_CONTENT = {
    "model": is_text, "created": is_text, "block_width": is_count, "encoding": is_text, "per_token": is_flag,
    "metadata": object_of(is_anything), "parameters": list_of(is_anything),
}  # fmt: skip
MAX_FEATURES, MAX_BLOCKS = 1 << 31, 1 << 24  # limits of a valid file


@dataclass(frozen=True)
class Header:
    """Values that all segments share."""

    model: str
    created: str  # ISO 8601
    table: ParameterTable
    encoding: str = "log16"
    per_token: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)

    def content(self) -> dict[str, Any]:
        """The header as JSON values."""
        own = {name: value for name, value in vars(self).items() if name != "table"}
        parameters = [
            (one.name, one.kind, one.in_features, one.out_features, one.in_head, one.out_head)
            for one in self.table.entries
        ]
        return own | {"block_width": self.table.block_width, "parameters": parameters}

    def differences(self, other: "Header") -> list[str]:
        """Keys whose values differ and so prevent combining two files; date and metadata may differ."""
        theirs, apart = other.content(), {"created", "metadata"}
        return [name for name, value in self.content().items() if name not in apart and value != theirs[name]]


def pack_header(header: Header) -> bytes:
    """Preamble and padded JSON; equal headers give equal bytes."""
    text = json.dumps(header.content(), sort_keys=True, separators=(",", ":")).encode()
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
    if len(file) < _START.size:
        raise damaged(path, f"truncated at {len(file)} bytes, in the first {_START.size}")
    magic, version = _START.unpack_from(file)
    if magic != MAGIC:
        what = f"{path.name} is no .mscan file: it begins with {magic!r}, not {MAGIC!r}"
        raise refused(path, what, "name a file that the scanner wrote")
    if version != VERSION:
        what = f"{path.name} is of .mscan version {version}; {VERSION} is known here"
        raise refused(path, what, "read it with the release that wrote it, or scan again")
    if len(file) < PREAMBLE.size:
        raise damaged(path, f"truncated at {len(file)} bytes, in the first {PREAMBLE.size}")
    length, checksum = PREAMBLE.unpack_from(file)[3:]
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
    own = {name: content[name] for name in _CONTENT}
    if own["encoding"] not in ENCODINGS:
        raise ValueError(f"encoding is none of {', '.join(ENCODINGS)}")
    if not 1 <= own["block_width"] <= MAX_FEATURES:
        raise ValueError(f"block_width is not between 1 and {MAX_FEATURES}")
    width, entries = own.pop("block_width"), own.pop("parameters")
    table = ParameterTable(tuple(_read_entry(entry, width) for entry in entries), width)
    if sum(table.widths) > MAX_BLOCKS:
        raise ValueError(f"its parameters have more than {MAX_BLOCKS} blocks")
    return Header(table=table, **own)


def _read_entry(entry: object, width: int) -> WatchedParameter:
    kinds: list[set[type]] = [{str}, {str}, {int}, {int}, {int, type(None)}, {int, type(None)}]
    parts: list[Any] = entry if isinstance(entry, list) else []
    if [type(part) in kind for part, kind in zip(parts, kinds, strict=False)] != [True] * 6 or not is_text(parts[0]):
        raise ValueError("a parameter is not [name, kind, in_features, out_features, in_head, out_head]")
    name, kind, inputs, outputs, *heads = parts
    if kind not in {"linear", "embedding"} or not all(1 <= side <= MAX_FEATURES for side in (inputs, outputs)):
        raise ValueError(f"parameter {name} is {kind} of {inputs} to {outputs} features")
    if not all(head is None or 1 <= head <= MAX_FEATURES for head in heads):
        raise ValueError(f"parameter {name} has heads {heads} wide")
    return WatchedParameter(name, kind, inputs, outputs, width, *heads)


# One row per sequence ...
SEQUENCE_ARRAYS = ("activation", "gradient", "in_activation", "in_gradient", "out_gradient")
# ... and one per token.
TOKEN_ARRAYS = ("token_activation", "token_gradient")


@dataclass(frozen=True)
class StoredSequence:
    """One sequence; its number in the scan is unique within a file."""

    number: int
    name: str
    tokens: int
    source: str = ""


def first_tokens(sequences: Iterable[StoredSequence]) -> list[int]:
    """Row of each sequence's first token, and the total number of tokens."""
    return [0, *accumulate(sequence.tokens for sequence in sequences)]


@dataclass(frozen=True)
class Rows:
    """B sequences and float32 arrays (B, P), (B, I), (B, O) and, with values per token, (Σtokens, P)."""

    sequences: tuple[StoredSequence, ...]
    arrays: dict[str, NDArray[np.float32]]

    def cut(self, start: int, stop: int) -> "Rows":
        """Sequences `start` to `stop`, without a copy."""
        token = first_tokens(self.sequences)
        rows, tokens = slice(start, stop), slice(token[start], token[stop])
        arrays = {name: array[tokens if name in TOKEN_ARRAYS else rows] for name, array in self.arrays.items()}
        return Rows(self.sequences[start:stop], arrays)

    def nbytes(self) -> list[int]:
        """Bytes of each sequence's float32 rows."""
        fixed = 4 * sum(array.shape[1] for name, array in self.arrays.items() if name in SEQUENCE_ARRAYS)
        token = 4 * sum(array.shape[1] for name, array in self.arrays.items() if name in TOKEN_ARRAYS)
        return [fixed + token * sequence.tokens for sequence in self.sequences]


def array_widths(header: Header) -> dict[str, int]:
    """Array name → number of columns, in file order."""
    parameters, inputs, outputs = header.table.widths
    widths = dict(zip(SEQUENCE_ARRAYS, (parameters, parameters, inputs, inputs, outputs), strict=True))
    return widths | dict.fromkeys(TOKEN_ARRAYS if header.per_token else (), parameters)


def join(parts: Sequence[Rows]) -> Rows:
    """Concatenate all parts."""
    if len(parts) == 1:
        return parts[0]
    arrays = {name: np.concatenate([part.arrays[name] for part in parts]) for name in parts[0].arrays}
    return Rows(tuple(sequence for part in parts for sequence in part.sequences), arrays)
