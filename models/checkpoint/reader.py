"""Tensors of a checkpoint, one at a time: cut out of fused ones, and dequantised where they are in 4 or 8 bits."""

from collections.abc import KeysView, Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from instruments.errors import CheckpointError
from instruments.safetensors_header import read_header
from instruments.safetensors_reader import TORCH_DTYPES, EntryReader
from models.checkpoint.folder import Entry, PackedEntry, read_checkpoint
from models.config import import_bitsandbytes
from models.dense import DenseFamily, dense_family, fused_name
from models.source import read_config


class ShardReader(EntryReader, AbstractContextManager["ShardReader"]):
    """One open checkpoint: its configuration, and its tensors by the names that transformers gives them."""

    def __init__(self, source: Path) -> None:
        """Read and check all headers of a checkpoint folder, or of one safetensors file. Raises CheckpointError."""
        super().__init__()
        self._source = source
        self._entries: dict[str, Entry] = dict(read_header(source)) if source.is_file() else read_checkpoint(source)

    def __exit__(self, *_error: object) -> None:
        """Close the shards."""
        self.close()

    @cached_property
    def config(self) -> dict[str, Any]:
        """The folder's config.json. Raises CheckpointError."""
        return read_config(self._source)

    @cached_property
    def family(self) -> DenseFamily:
        """Of a dense checkpoint. Raises CheckpointError: it is not supported."""
        return dense_family(self.config)

    @property
    def names(self) -> KeysView[str]:
        """Names of all tensors as they are stored, in the order of the shards."""
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a stored tensor, of a quantised weight the true one."""
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Number format of a stored tensor, of a quantised weight the one it is dequantised to."""
        return TORCH_DTYPES[self._entry(name).dtype]

    def tensor(self, name: str) -> Tensor:
        """A private copy on the CPU; gate, up, q, k and v are cut out of a fused tensor where they are stored so.

        Raises CheckpointError: there is none, or its file has changed; ConfigError: no bitsandbytes to decode it.
        """
        whole = fused_name(name)
        if name not in self._entries and whole in self._entries:
            # A view would keep the other parts in memory.
            return self.tensor(whole)[self._fused_rows(name, whole)].clone()
        entry = self._entry(name)
        if isinstance(entry, PackedEntry):
            return _dequantise(entry, {key: self.read(part, name) for key, part in entry.parts.items()})
        return self.read(entry, name)

    def _fused_rows(self, name: str, whole: str) -> slice:
        count, part = self.shape(whole)[0], name.split(".")[-2]
        if part in {"gate_proj", "up_proj"}:
            return slice(0, count // 2) if part == "gate_proj" else slice(count // 2, count)
        # As wide as what the output projection takes; k and v share the rest.
        queries = self.shape(whole.replace("qkv_proj", "o_proj"))[1]
        keys = (count - queries) // 2
        starts = {"q_proj": (0, queries), "k_proj": (queries, queries + keys), "v_proj": (queries + keys, count)}
        return slice(*starts[part])

    def _entry(self, name: str) -> Entry:
        if name not in self._entries:
            raise CheckpointError(f"there is no tensor {name}", do="check that the checkpoint is complete")
        return self._entries[name]


def _dequantise(entry: PackedEntry, parts: Mapping[str, Tensor]) -> Tensor:
    """The weight in its true shape and number format, from its tensors as stored.

    Numerics: 4 bits exactly as bitsandbytes decodes them, in the format the weight had before; int8 in fp32, then
        rounded once.
    """
    functional = import_bitsandbytes(f"a checkpoint stored in {entry.kind}").functional
    plain: Tensor
    if entry.kind == "int8":
        plain = functional.int8_vectorwise_dequant(parts["weight"], parts["SCB"])
    else:
        described = {key: part for key, part in parts.items() if key != "weight"}
        state = functional.QuantState.from_dict(described, torch.device("cpu"))
        # For distributed training, packed bytes may be stored under another format's name.
        plain = functional.dequantize_4bit(parts["weight"].view(torch.uint8).view(-1, 1), state)
    return plain.to(TORCH_DTYPES[entry.dtype])
