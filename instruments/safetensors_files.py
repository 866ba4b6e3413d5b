"""Safetensors files: header, tensors and JSON facts, read after checks.

Format: 8 bytes little-endian length, that many bytes of JSON ``{name: {dtype, shape, data_offsets}}``, then the
data, without holes. Source: https://github.com/huggingface/safetensors#format. Headers are read without torch.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Self
from zlib import crc32

from safetensors import SafetensorError, safe_open

from instruments.dtypes import SAFETENSORS, torch_dtype
from instruments.errors import CheckpointError
from instruments.files import whole_file

if TYPE_CHECKING:
    from torch import Tensor

_FACTS = "tiny_onn"  # the key under which `save_tensors` puts JSON values into the metadata
_CHECKSUM = "checksum"
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
    header, start = _parse(path)
    header.pop("__metadata__", None)
    if unknown := {spec["dtype"] for spec in header.values()} - SAFETENSORS.keys():
        raise _damaged(path, f"tensors of {', '.join(sorted(unknown))} cannot be read")
    entries = {}
    for name, spec in header.items():
        begin, end = spec["data_offsets"]
        entries[name] = TensorEntry(path, spec["dtype"], tuple(spec["shape"]), start + begin, end - begin)
    return entries


def read_facts(path: Path) -> dict[str, Any]:
    """The JSON values given to `save_tensors`; empty if there are none. Raises CheckpointError: the file is damaged."""
    metadata = _parse(path)[0].get("__metadata__") or {}
    try:
        return dict(json.loads(metadata.get(_FACTS, "{}")))
    except (ValueError, TypeError, RecursionError) as error:
        raise _damaged(path, f"its facts are no JSON: {error}") from error


def _parse(path: Path) -> tuple[dict[str, Any], int]:
    """The header, which safetensors checks against the file's size, and the offset at which the data begins."""
    try:
        if not path.is_file():
            raise CheckpointError(f"{path.name} is missing", where=str(path), do=_RESTORE)
        with safe_open(path, framework="numpy"), path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            return dict(json.loads(file.read(length))), 8 + length
    except OSError as error:
        raise CheckpointError(f"cannot open {path.name}: {error.strerror}", where=str(path), do=_RESTORE) from error
    except SafetensorError as error:
        raise _damaged(path, str(error)) from error


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
    with EntryReader() as reader:
        tensors = {name: reader.read(entry, name) for name, entry in read_header(path).items()}
    facts = read_facts(path)
    if facts.pop(_CHECKSUM, None) != _checksum(tensors, facts):
        raise _damaged(path, "its content does not match its checksum")
    return tensors, facts


def _checksum(tensors: Mapping[str, "Tensor"], facts: Mapping[str, Any]) -> int:
    held = {name: [str(tensor.dtype), list(tensor.shape), checksum_of(tensor)] for name, tensor in tensors.items()}
    return crc32(json.dumps([held, facts], sort_keys=True).encode())


def _damaged(path: Path, detail: str) -> CheckpointError:
    return CheckpointError(f"{path.name} is damaged: {detail}", where=str(path), do=_RESTORE)


class EntryReader:
    """Reads tensors listed in headers into private memory; files are opened when first needed.

    A memory map counts all pages touched until the file's last tensor is dropped, and a file truncated while mapped
    kills the process. Here the memory is one tensor's, and the failure an error.
    """

    def __init__(self) -> None:
        self._files: dict[Path, BufferedReader] = {}
        self._reading = Lock()  # other threads read ahead

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; reading opens them again."""
        while self._files:
            self._files.popitem()[1].close()

    def read(self, entry: TensorEntry, name: str) -> "Tensor":
        """A private copy on the CPU. Raises CheckpointError: the file cannot be opened, or was truncated."""
        import torch  # noqa: PLC0415

        data = torch.empty(entry.nbytes, dtype=torch.uint8)
        with self._reading:
            if entry.path not in self._files:
                try:
                    self._files[entry.path] = entry.path.open("rb")
                except OSError as error:
                    what = f"cannot open {entry.path.name}: {error.strerror}"
                    raise CheckpointError(what, where=str(entry.path)) from error
            file = self._files[entry.path]
            file.seek(entry.offset)
            count = file.readinto(data.numpy().data)
        if count != entry.nbytes:
            raise CheckpointError(f"{entry.path.name} was cut short while in use", where=f"{entry.path}, {name}")
        return data.view(torch_dtype(entry.dtype)).view(entry.shape)


def checksum_of(tensor: "Tensor") -> int:
    """CRC-32 of a tensor's bytes on the CPU, in row-major order."""
    import torch  # noqa: PLC0415

    return crc32(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
