"""A checkpoint written tensor by tensor, in shards."""

import json
from pathlib import Path
from types import TracebackType

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from instruments.durable import sync
from instruments.errors import CheckpointError
from instruments.safetensors_header import read_header
from instruments.safetensors_reader import TORCH_DTYPES
from models.checkpoint.folder import INDEX, SINGLE

_Spec = tuple[tuple[int, ...], str]  # shape, dtype


class ShardWriter:
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
        self._shards: list[tuple[Path, dict[str, _Spec]]] = []
        self._names: set[str] = set()

    def __enter__(self) -> "ShardWriter":
        """Nothing to open."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close after success; after a failure remove what was written."""
        if kind is None:
            self.close()
        else:
            for path, _specs in self._shards:
                path.unlink(missing_ok=True)

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor; it must not change until the shard is written.

        Raises:
            CheckpointError: a second tensor of the same name, or the shard cannot be written.
        """
        if name in self._names:
            raise CheckpointError(f"tensor {name} was already written", where=str(self._folder))
        self._names.add(name)
        if self._pending and self._pending_bytes + tensor.nbytes > self._max_shard_bytes:
            self._flush()
        own = tensor.detach().cpu().contiguous()
        if own.data_ptr() in self._pointers:
            # safetensors refuses one memory under two names.
            own = own.clone()
        self._pointers.add(own.data_ptr())
        self._pending[name] = own
        self._pending_bytes += own.nbytes

    def close(self) -> None:
        """Write the last shard, name all shards, check them by their headers, write the index."""
        self._flush()
        finals = [self._final_name(number) for number in range(len(self._shards))]
        for (path, specs), final in zip(self._shards, finals, strict=True):
            path.rename(final)
            _verify(final, specs)
        if len(finals) > 1:
            self._write_index(finals)
        sync(self._folder)

    def _flush(self) -> None:
        if not self._pending:
            return
        path = self._folder / f"shard-{len(self._shards):05}.partial"
        self._shards.append((path, {name: _spec(tensor) for name, tensor in self._pending.items()}))
        try:
            # transformers 4 refuses files whose metadata does not name the framework.
            save_file(self._pending, path, metadata={"format": "pt"})
        except SafetensorError as error:
            raise CheckpointError(
                f"cannot write a shard: {error}", where=str(path), do="free disk space or choose another output_dir"
            ) from error
        sync(path)
        self._pending, self._pending_bytes, self._pointers = {}, 0, set()

    def _final_name(self, number: int) -> Path:
        if len(self._shards) == 1:
            return self._folder / SINGLE
        return self._folder / f"model-{number + 1:05}-of-{len(self._shards):05}.safetensors"

    def _write_index(self, finals: list[Path]) -> None:
        named = list(zip(finals, (specs for _path, specs in self._shards), strict=True))
        total = sum(entry.nbytes for final in finals for entry in read_header(final).values())
        weight_map = {name: final.name for final, specs in named for name in specs}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        path = self._folder / INDEX
        path.write_text(json.dumps(index, indent=2), encoding="utf-8")
        sync(path)


_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def _spec(tensor: Tensor) -> _Spec:
    return tuple(tensor.shape), _DTYPE_NAMES[tensor.dtype]


def _verify(path: Path, specs: dict[str, _Spec]) -> None:
    found = {name: (entry.shape, entry.dtype) for name, entry in read_header(path).items()}
    if found != specs:
        wrong = sorted(name for name in found.keys() | specs.keys() if found.get(name) != specs.get(name))
        raise CheckpointError(f"what was written is not what was given: {', '.join(wrong[:3])}", where=str(path))
