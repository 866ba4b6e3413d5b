"""Tensors of a checkpoint, one at a time."""

from collections.abc import KeysView
from io import BufferedReader
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from models.checkpoint.folder import read_checkpoint
from models.checkpoint.header import TensorEntry, read_header
from models.errors import CheckpointError

TORCH_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


class ShardReader:
    """Reads tensors into private memory.

    A memory map would count every page touched until the last tensor of a shard is dropped, and a file cut short
    while mapped kills the process; here the cost is one tensor and the failure an error.
    """

    def __init__(self, source: Path) -> None:
        """Read and check all headers of a checkpoint folder, or of one safetensors file. Raises CheckpointError."""
        self._entries = read_header(source) if source.is_file() else read_checkpoint(source)
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
        """Shape as stored."""
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Number format as stored."""
        return TORCH_DTYPES[self._entry(name).dtype]

    def tensor(self, name: str) -> Tensor:
        """A private copy on the CPU. Raises CheckpointError: no such tensor, or the file has changed."""
        entry = self._entry(name)
        data = torch.empty(entry.nbytes, dtype=torch.uint8)
        if entry.path not in self._files:
            self._files[entry.path] = entry.path.open("rb")
        file = self._files[entry.path]
        file.seek(entry.offset)
        if file.readinto(data.numpy().data) != entry.nbytes:
            raise CheckpointError(f"{entry.path.name} was cut short while in use", where=f"{entry.path}, {name}")
        return data.view(self.dtype(name)).view(entry.shape)

    def _entry(self, name: str) -> TensorEntry:
        if name not in self._entries:
            raise CheckpointError(f"there is no tensor {name}", do="check that the checkpoint is complete")
        return self._entries[name]
