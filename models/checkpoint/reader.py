"""Tensors of a checkpoint, one at a time; those stored in 4 or 8 bits as the plain numbers they stand for."""

from collections.abc import KeysView
from io import BufferedReader
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from models.checkpoint.dequantise import dequantise
from models.checkpoint.dtypes import TORCH_DTYPES
from models.checkpoint.folder import read_checkpoint
from models.checkpoint.header import TensorEntry, read_header
from models.checkpoint.packed import Entry, PackedEntry, join_packed
from models.errors import CheckpointError


class ShardReader:
    """Reads tensors into private memory.

    A memory map would count every page touched until the last tensor of a shard is dropped, and a file cut short
    while mapped kills the process; here the cost is one tensor and the failure an error.
    """

    def __init__(self, source: Path) -> None:
        """Read and check all headers of a checkpoint folder, or of one safetensors file. Raises CheckpointError."""
        self._entries: dict[str, Entry] = dict(read_header(source)) if source.is_file() else _read_folder(source)
        self._files: dict[Path, BufferedReader] = {}

    def __enter__(self) -> "ShardReader":
        """Shards are opened when they are first needed."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the shards."""
        self.close()

    def close(self) -> None:
        """Close the shards; reading again opens them again."""
        while self._files:
            self._files.popitem()[1].close()

    @property
    def names(self) -> KeysView[str]:
        """Names of all tensors, in the order of the shards."""
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape, of a quantised weight the true one."""
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Number format, of a quantised weight the one it is dequantised to."""
        return TORCH_DTYPES[self._entry(name).dtype]

    def tensor(self, name: str) -> Tensor:
        """A private copy on the CPU.

        Raises:
            CheckpointError: no such tensor, or the file has changed.
            ConfigError: a weight in 4 or 8 bits, and no bitsandbytes to decode it.
        """
        entry = self._entry(name)
        if isinstance(entry, PackedEntry):
            return dequantise(entry, {key: self._read(part, name) for key, part in entry.parts.items()})
        return self._read(entry, name)

    def _read(self, entry: TensorEntry, name: str) -> Tensor:
        data = torch.empty(entry.nbytes, dtype=torch.uint8)
        if entry.path not in self._files:
            self._files[entry.path] = entry.path.open("rb")
        file = self._files[entry.path]
        file.seek(entry.offset)
        if file.readinto(data.numpy().data) != entry.nbytes:
            raise CheckpointError(f"{entry.path.name} was cut short while in use", where=f"{entry.path}, {name}")
        return data.view(TORCH_DTYPES[entry.dtype]).view(entry.shape)

    def _entry(self, name: str) -> Entry:
        if name not in self._entries:
            raise CheckpointError(f"there is no tensor {name}", do="check that the checkpoint is complete")
        return self._entries[name]


def _read_folder(folder: Path) -> dict[str, Entry]:
    entries, errors = join_packed(read_checkpoint(folder), folder)
    if errors:
        raise errors[0]
    return entries
