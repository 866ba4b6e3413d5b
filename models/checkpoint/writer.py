"""A checkpoint written tensor by tensor, in shards."""

import json
from contextlib import AbstractContextManager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from instruments.durable import sync
from instruments.errors import CheckpointError
from instruments.safetensors_header import read_header
from instruments.safetensors_reader import TORCH_DTYPES
from models.checkpoint.folder import INDEX, SINGLE

_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class ShardWriter(AbstractContextManager["ShardWriter"]):
    """Collects tensors and writes a shard whenever one is full.

    Memory: one shard and one tensor. As a context manager it closes on success and leaves no checkpoint on failure.
    """

    def __init__(self, folder: Path, max_shard_bytes: int = 256 * 2**20) -> None:
        """Create the folder; the shards carry temporary names until `close`."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._max_shard_bytes = folder, max_shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._pointers: set[int] = set()
        self._shards: list[tuple[Path, list[str]]] = []  # path and names of its tensors
        self._names: set[str] = set()

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        """Close after success; after a failure remove what was written."""
        if kind is None:
            self.close()
            return
        for path, _names in self._shards:
            path.unlink(missing_ok=True)

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor of a new name; it must not change until the shard is written. Raises CheckpointError."""
        if name in self._names:
            raise CheckpointError(f"tensor {name} was already written", where=str(self._folder))
        self._names.add(name)
        if self._pending_bytes + tensor.nbytes > self._max_shard_bytes:
            self._flush()
        own = tensor.detach().cpu().contiguous()
        if own.data_ptr() in self._pointers:
            # safetensors refuses one memory under two names.
            own = own.clone()
        self._pointers.add(own.data_ptr())
        self._pending[name] = own
        self._pending_bytes += own.nbytes

    def close(self) -> None:
        """Write the last shard, give all shards their names, and write the index."""
        self._flush()
        weight_map: dict[str, str] = {}
        count, total = len(self._shards), 0
        for number, (path, names) in enumerate(self._shards, start=1):
            final = SINGLE if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
            total += sum(entry.nbytes for entry in read_header(path.rename(self._folder / final)).values())
            weight_map |= dict.fromkeys(names, final)
        if count > 1:
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (self._folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
            sync(self._folder / INDEX)
        sync(self._folder)

    def _flush(self) -> None:
        """Write a shard and check it by its header."""
        if not self._pending:
            return
        path = self._folder / f"shard-{len(self._shards):05}.partial"
        self._shards.append((path, list(self._pending)))
        try:
            # transformers 4 refuses files whose metadata does not name the framework.
            save_file(self._pending, path, metadata={"format": "pt"})
        except SafetensorError as error:
            raise CheckpointError(
                f"cannot write a shard: {error}", where=str(path), do="free disk space or choose another output_dir"
            ) from error
        given = {name: (tuple(tensor.shape), _DTYPE_NAMES[tensor.dtype]) for name, tensor in self._pending.items()}
        found = {name: (entry.shape, entry.dtype) for name, entry in read_header(path).items()}
        if wrong := sorted(name for name in found.keys() | given if found.get(name) != given.get(name)):
            raise CheckpointError(f"what was written is not what was given: {', '.join(wrong[:3])}", where=str(path))
        sync(path)
        self._pending, self._pending_bytes, self._pointers = {}, 0, set()
