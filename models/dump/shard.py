"""Files of tensors, each whole and on the disk before anyone hears of it."""

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from models.checkpoint.durable import whole_file


def shard_name(rank: int, number: int) -> str:
    """Of a process's files, in the order it wrote them."""
    return f"tensors-{rank:05}-{number:05}.safetensors"


def save_shard(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write contiguous tensors; after an error or a kill there is no file of this name.

    Raises:
        OSError, SafetensorError: the disk is full or forbids it.
    """
    with whole_file(path) as unfinished:
        save_file(dict(tensors), unfinished, metadata={"format": "pt"})
