"""Tensors of a checkpoint, one at a time; those stored in 4 or 8 bits are dequantised."""

from collections.abc import KeysView, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from instruments.errors import CheckpointError
from instruments.safetensors_header import read_header
from instruments.safetensors_reader import TORCH_DTYPES, EntryReader
from models.checkpoint.folder import Entry, PackedEntry, join_packed, read_checkpoint
from models.config import import_bitsandbytes, missing_bitsandbytes


def dequantise(entry: PackedEntry, parts: Mapping[str, Tensor]) -> Tensor:
    """The weight in its true shape and number format.

    Args:
        entry: its description from the headers.
        parts: its tensors as stored.
    Raises:
        ConfigError: bitsandbytes is not installed.
    Numerics: 4 bits exactly as bitsandbytes decodes them, in the format the weight had before; int8 in fp32, then
        rounded once.
    """
    # Imported here: it takes a while, and is an optional extra.
    if not find_spec("bitsandbytes"):
        raise missing_bitsandbytes(f"a checkpoint stored in {entry.kind}")
    functional = import_bitsandbytes().functional
    plain: Tensor
    if entry.kind == "int8":
        plain = functional.int8_vectorwise_dequant(parts["weight"], parts["SCB"])
        return plain.to(TORCH_DTYPES[entry.dtype])
    state = functional.QuantState.from_dict(
        {key: part for key, part in parts.items() if key != "weight"}, torch.device("cpu")
    )
    # For distributed training, packed bytes may be stored under another format's name.
    plain = functional.dequantize_4bit(parts["weight"].view(torch.uint8).view(-1, 1), state)
    return plain.to(TORCH_DTYPES[entry.dtype])


class ShardReader:
    """Reads one tensor at a time."""

    def __init__(self, source: Path) -> None:
        """Read and check all headers of a checkpoint folder, or of one safetensors file. Raises CheckpointError."""
        self._entries: dict[str, Entry] = dict(read_header(source)) if source.is_file() else _read_folder(source)
        self._files = EntryReader()

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
        self._files.close()

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
            return dequantise(entry, {key: self._files.read(part, name) for key, part in entry.parts.items()})
        return self._files.read(entry, name)

    def _entry(self, name: str) -> Entry:
        if name not in self._entries:
            raise CheckpointError(f"there is no tensor {name}", do="check that the checkpoint is complete")
        return self._entries[name]


def _read_folder(folder: Path) -> dict[str, Entry]:
    entries, errors = join_packed(read_checkpoint(folder), folder)
    if errors:
        raise errors[0]
    return entries
