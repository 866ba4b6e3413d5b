"""Safetensors files: header, tensors and JSON facts, read after checks; also the tensors of foreign .pt files.

Format: 8 bytes little-endian length, that many bytes of JSON ``{name: {dtype, shape, data_offsets}}``, then the
data, without holes. Source: https://github.com/huggingface/safetensors#format. Headers are read without torch.
"""

import json
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from pathlib import Path
from pickle import UnpicklingError  # noqa: TID251 - only the error
from typing import TYPE_CHECKING, Any
from zlib import crc32

from instruments.dtypes import SAFETENSORS, torch_dtype
from instruments.errors import CheckpointError, DataError
from instruments.files import whole_file

if TYPE_CHECKING:
    from torch import Tensor

# A sixth of the format's own limit: enough for 100,000 tensors, which take 400 MiB in memory.
MAX_HEADER_BYTES = 2**24

_METADATA = "__metadata__"
_FACTS = "tiny_onn"  # the key under which `save_tensors` puts JSON values into the metadata
_CHECKSUM = "checksum"
_MOST = 1 << 62  # larger numbers are not sizes
_RESTORE = "download or copy the file again"


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


def read_facts(path: Path) -> dict[str, Any]:
    """The JSON values given to `save_tensors`; empty if there are none. Raises CheckpointError: the file is damaged."""
    try:
        return dict(json.loads(read_metadata(path).get(_FACTS, "{}")))
    except (ValueError, TypeError, RecursionError) as error:
        raise _unreadable(path, error) from error


def save_tensors(path: Path, tensors: Mapping[str, "Tensor"], **facts: Any) -> None:  # noqa: ANN401 - any JSON value
    """Write tensors, JSON values and a checksum of both; the file appears only when it is complete."""
    from safetensors.torch import save_file  # noqa: PLC0415 - headers are checked without torch

    stored = {name: tensor.contiguous() for name, tensor in tensors.items()}
    facts[_CHECKSUM] = _checksum(stored, json.loads(json.dumps(facts)))
    with whole_file(path) as unfinished:
        save_file(stored, unfinished, metadata={_FACTS: json.dumps(facts, sort_keys=True)})


def load_tensors(path: Path) -> tuple[dict[str, "Tensor"], dict[str, Any]]:
    """The tensors, on the CPU, and the JSON values given to `save_tensors`.

    Raises CheckpointError: the file is missing, damaged, or of another program.
    """
    tensors, facts = _read_all(path), read_facts(path)
    if facts.pop(_CHECKSUM, None) != _checksum(tensors, facts):
        raise _damaged(path, "its content does not match its checksum")
    return tensors, facts


def _read_all(path: Path) -> dict[str, "Tensor"]:
    reader = EntryReader()
    try:
        return {name: reader.read(entry, name) for name, entry in read_header(path).items()}
    finally:
        reader.close()


def _checksum(tensors: Mapping[str, "Tensor"], facts: Mapping[str, Any]) -> int:
    held = {name: [str(tensor.dtype), list(tensor.shape), checksum_of(tensor)] for name, tensor in tensors.items()}
    return crc32(json.dumps([held, facts], sort_keys=True).encode())


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
    nbytes = prod(shape) * SAFETENSORS[spec["dtype"]][1]
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


class EntryReader:
    """Reads tensors listed in headers into private memory; files are opened when first needed.

    A memory map counts all pages touched until the file's last tensor is dropped, and a file truncated while mapped
    kills the process. Here the memory is one tensor's, and the failure an error.
    """

    def __init__(self) -> None:
        self._files: dict[Path, BufferedReader] = {}

    def close(self) -> None:
        """Close the files; reading opens them again."""
        while self._files:
            self._files.popitem()[1].close()

    def read(self, entry: TensorEntry, name: str) -> "Tensor":
        """A private copy on the CPU. Raises CheckpointError: the file cannot be opened, or was truncated."""
        import torch  # noqa: PLC0415

        data = torch.empty(entry.nbytes, dtype=torch.uint8)
        if entry.path not in self._files:
            try:
                self._files[entry.path] = entry.path.open("rb")
            except OSError as error:
                raise CheckpointError(
                    f"cannot open {entry.path.name}: {error.strerror}", where=str(entry.path)
                ) from error
        file = self._files[entry.path]
        file.seek(entry.offset)
        if file.readinto(data.numpy().data) != entry.nbytes:
            raise CheckpointError(f"{entry.path.name} was cut short while in use", where=f"{entry.path}, {name}")
        return data.view(torch_dtype(entry.dtype)).view(entry.shape)


def checksum_of(tensor: "Tensor") -> int:
    """CRC-32 of a tensor's bytes on the CPU, in row-major order."""
    import torch  # noqa: PLC0415

    return crc32(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def read_tensors(path: Path) -> Any:  # noqa: ANN401 - a tensor, or plain containers of them
    """Read a .pt or .safetensors file of tensors, numbers and text, in lists and dicts.

    Raises:
        CheckpointError, DataError: the file cannot be read, or holds anything else.
    """
    if path.suffix == ".safetensors":
        return _read_all(path)
    import torch  # noqa: PLC0415

    try:
        # weights_only: no code from the file runs.
        return torch.load(path, map_location="cpu", weights_only=True)  # noqa: TID251
    except UnpicklingError as error:
        # torch's own message advises weights_only=False, which would run code from the file.
        raise _no_tensors(path, "it holds more than tensors, and opening that can run any code") from error
    except Exception as error:  # torch.load raises many kinds of errors on other files
        raise _no_tensors(path, str(error).strip().partition("\n")[0][:200] or type(error).__name__) from error


def _no_tensors(path: Path, reason: str) -> DataError:
    do = "give a .safetensors file, or a .pt file of tensors alone"
    return DataError(f"no tensors can be read: {reason}", where=str(path), do=do)


def flatten_tensors(held: Any, name: str = "") -> Iterator[tuple[str, "Tensor"]]:  # noqa: ANN401 - of `read_tensors`
    """Tensors by path, such as "state.weight"."""
    import torch  # noqa: PLC0415

    if isinstance(held, torch.Tensor):
        yield name or "tensor", held
    elif isinstance(held, Mapping | list | tuple):
        for key, item in held.items() if isinstance(held, Mapping) else enumerate(held):
            yield from flatten_tensors(item, f"{name}.{key}".lstrip("."))
