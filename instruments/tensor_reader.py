"""Read tensors of files: single ones of safetensors files, and all of a file that is not trusted."""

from collections.abc import Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from pickle import UnpicklingError  # noqa: TID251 - only the error
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from instruments.errors import CheckpointError, DataError, UserError
from instruments.safetensors_header import DTYPES, TensorEntry, read_header

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, theirs) for name, (theirs, _size) in DTYPES.items()}


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


def read_tensors(path: Path) -> Any:  # noqa: ANN401 - a tensor, or plain containers of them
    """Read a .pt or .safetensors file of tensors, numbers and text, in lists and dicts.

    Raises:
        DataError: the file cannot be read, or holds anything else.
    """
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file  # noqa: PLC0415 - .pt needs torch only

            read_header(path)
            return dict(load_file(path))
        # weights_only: no code from the file runs.
        return torch.load(path, map_location="cpu", weights_only=True)  # noqa: TID251
    except UserError:
        raise
    except UnpicklingError as error:
        # torch's own message advises weights_only=False, which would run code from the file.
        raise _unreadable(path, "it holds more than tensors, and opening that can run any code") from error
    except Exception as error:  # torch.load raises many kinds of errors on other files
        raise _unreadable(path, str(error).strip().partition("\n")[0][:200] or type(error).__name__) from error


def _unreadable(path: Path, reason: str) -> DataError:
    do = "give a .safetensors file, or a .pt file of tensors alone"
    return DataError(f"no tensors can be read: {reason}", where=str(path), do=do)


def flatten_tensors(held: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:  # noqa: ANN401 - of `read_tensors`
    """Tensors by path, such as "state.weight"."""
    if isinstance(held, Tensor):
        yield name or "tensor", held
    elif isinstance(held, Mapping | list | tuple):
        for key, item in held.items() if isinstance(held, Mapping) else enumerate(held):
            yield from flatten_tensors(item, f"{name}.{key}".lstrip("."))
