"""Read the header of a safetensors file, and write JSON values into its metadata.

Format: 8 bytes little-endian length, that many bytes of JSON ``{name: {dtype, shape, data_offsets}}``, then the data,
without holes. Source: https://github.com/huggingface/safetensors#format.
"""

import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from instruments.errors import CheckpointError

# A sixth of the format's own limit: enough for 100,000 tensors, which take 400 MiB in memory.
MAX_HEADER_BYTES = 2**24

_METADATA = "__metadata__"
_TAG = "tiny_onn"  # the key under which JSON values are in the metadata
_MOST = 1 << 62  # larger numbers are not sizes
_RESTORE = "download or copy the file again"

# Name in the format → name in torch, bytes per value.
DTYPES = {
    "BOOL": ("bool", 1), "U8": ("uint8", 1), "I8": ("int8", 1),
    "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1),
    "U16": ("uint16", 2), "I16": ("int16", 2), "F16": ("float16", 2), "BF16": ("bfloat16", 2),
    "U32": ("uint32", 4), "I32": ("int32", 4), "F32": ("float32", 4),
    "U64": ("uint64", 8), "I64": ("int64", 8), "F64": ("float64", 8),
}  # fmt: skip


@dataclass(frozen=True)
class TensorEntry:
    """Location of a tensor: `nbytes` from byte `offset` of the file `path`."""

    path: Path
    dtype: str  # name in the format: BF16, F32 ...
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_header(path: Path) -> dict[str, TensorEntry]:
    """All tensors of a file, checked against its size. Raises CheckpointError: missing, truncated, another format."""
    header, data_start, size = _parse(path)
    header.pop(_METADATA, None)
    try:
        entries = {name: _entry(path, data_start, spec) for name, spec in header.items()}
    except (ValueError, KeyError, TypeError) as error:
        raise _unreadable(path, error) from error
    _check_layout(path, data_start, size, entries)
    return entries


def read_metadata(path: Path) -> dict[str, str]:
    """The free metadata of a file's header. Raises CheckpointError."""
    metadata = _parse(path)[0].get(_METADATA) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _damaged(path, f"{_METADATA} is no object of texts")
    return metadata


def pack_tag(**values: Any) -> dict[str, str]:  # noqa: ANN401 - any JSON value
    """Metadata for `save_file` with these values as JSON."""
    return {_TAG: json.dumps(values, sort_keys=True)}


def unpack_tag(metadata: Mapping[str, str] | None) -> dict[str, Any]:
    """The values given to `pack_tag`; empty if the metadata has none. Raises ValueError: not JSON."""
    tag: dict[str, Any] = json.loads((metadata or {}).get(_TAG, "{}"))
    return tag


def _parse(path: Path) -> tuple[dict[str, Any], int, int]:
    """The header, the offset at which the data begins, and the file's size."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise _damaged(path, "it is no regular file")
        size = status.st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= size - 8:
                raise _damaged(path, f"header length {length} does not fit a file of {size} bytes")
            if length > MAX_HEADER_BYTES:
                raise _damaged(path, f"a header of {length:,} bytes, more than the {MAX_HEADER_BYTES:,} it may have")
            raw = file.read(length)
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        what = f"{path.name} is missing" if missing else f"cannot open {path.name}: {error.strerror}"
        raise CheckpointError(what, where=str(path), do=_RESTORE) from error
    try:
        return dict(json.loads(raw.decode())), 8 + length, size
    except (ValueError, TypeError, RecursionError) as error:
        raise _unreadable(path, error) from error


def _entry(path: Path, data_start: int, spec: dict[str, Any]) -> TensorEntry:
    begin, end = spec["data_offsets"]
    shape = tuple(spec["shape"])
    if not all(type(number) is int and 0 <= number < _MOST for number in (begin, end, *shape)):
        raise ValueError("shape or data_offsets hold an invalid size")
    if prod(max(side, 1) for side in shape) >= _MOST:
        raise ValueError(f"shape {list(shape)} is too large for a tensor")
    nbytes = prod(shape) * DTYPES[spec["dtype"]][1]
    if end - begin != nbytes:
        raise ValueError(f"{spec['dtype']} {list(shape)} needs {nbytes} bytes, has {end - begin}")
    return TensorEntry(path, spec["dtype"], shape, data_start + begin, nbytes)


def _check_layout(path: Path, data_start: int, size: int, entries: dict[str, TensorEntry]) -> None:
    expected = data_start
    for entry in sorted(entries.values(), key=lambda entry: (entry.offset, entry.nbytes)):
        if entry.offset != expected:
            raise _damaged(path, f"hole or overlap at byte {expected}")
        expected += entry.nbytes
    if expected != size:
        kind = "truncated" if size < expected else "too long"
        raise _damaged(path, f"{kind}: {size} bytes, the header says {expected}")


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    return _damaged(path, f"unreadable header ({type(error).__name__}: {error})")


def _damaged(path: Path, detail: str) -> CheckpointError:
    return CheckpointError(f"{path.name} is damaged: {detail}", where=str(path), do=_RESTORE)
