"""Read tensors of safetensors files into private memory.

A memory map counts all pages touched until the file's last tensor is dropped, and a file truncated while mapped kills
the process. Here the memory is one tensor's, and the failure an error.
"""

from io import BufferedReader
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor

from instruments.errors import CheckpointError
from instruments.safetensors_header import DTYPES, TensorEntry

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, theirs) for name, (theirs, _size) in DTYPES.items()}


class EntryReader:
    """Reads tensors listed in headers; files are opened when first needed."""

    def __init__(self) -> None:
        self._files: dict[Path, BufferedReader] = {}

    def close(self) -> None:
        """Close the files; reading opens them again."""
        while self._files:
            self._files.popitem()[1].close()

    def read(self, entry: TensorEntry, name: str) -> Tensor:
        """A private copy on the CPU. Raises CheckpointError: the file cannot be opened, or was truncated."""
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
        return data.view(TORCH_DTYPES[entry.dtype]).view(entry.shape)


def checksum_of(tensor: Tensor) -> int:
    """CRC-32 of a tensor's bytes on the CPU, in row-major order."""
    return crc32(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
