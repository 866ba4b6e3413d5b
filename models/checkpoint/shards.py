"""Read and write a checkpoint's tensors one at a time, and decode 4- and 8-bit weights."""

import json
from collections.abc import Iterator, KeysView, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from instruments.dtypes import stored_name, torch_dtype
from instruments.errors import CheckpointError
from instruments.files import sync
from instruments.safetensors_files import EntryReader, read_header
from models.checkpoint.folder import INDEX, SINGLE, Entry, PackedEntry, read_checkpoint
from models.decoder import PROJECTIONS, Decoder
from models.finding import find_decoder
from models.quantization import import_bitsandbytes


class ShardReader(EntryReader):
    """An open checkpoint."""

    def __init__(self, source: Path) -> None:
        """Read and check all headers of a checkpoint folder. Raises CheckpointError."""
        super().__init__()
        self._source = source
        self._entries: dict[str, Entry] = read_checkpoint(source)

    @property
    def names(self) -> KeysView[str]:
        """Names of all stored tensors, in shard order."""
        return self._entries.keys()

    def tensor(self, name: str) -> Tensor:
        """Read a private copy to the CPU.

        Raises CheckpointError: no such tensor, or its file has changed; ConfigError: it needs bitsandbytes.
        """
        entry = self._entry(name)
        if isinstance(entry, PackedEntry):
            return _dequantise(entry, {key: self.read(part, name) for key, part in entry.parts.items()})
        return self.read(entry, name)

    def dtype(self, name: str) -> torch.dtype:
        """Number format of a tensor; of a quantised weight, the format after dequantisation."""
        return torch_dtype(self._entry(name).dtype)

    def _entry(self, name: str) -> Entry:
        if name not in self._entries:
            raise CheckpointError(f"there is no tensor {name}", do="check that the checkpoint is complete")
        return self._entries[name]


class DenseReader(ShardReader):
    """An open checkpoint of a dense decoder; tensors have the names of transformers' class."""

    def __init__(self, source: Path, *, text_only: bool = False) -> None:
        """As `ShardReader`; `text_only`: of a wrapper, only the text part, by the names of its own class."""
        super().__init__(source)
        self.text_only = text_only

    @cached_property
    def decoder(self) -> Decoder:
        """The dense decoder. Raises CheckpointError: it cannot be carved."""
        return find_decoder(self._source, text_only=self.text_only)

    @cached_property
    def tied(self) -> bool:
        """Whether input and output embedding are one tensor; as in transformers 5, two that differ are not tied."""
        decoder = self.decoder
        if decoder.head not in decoder.stored:
            return True
        return decoder.tied and torch.equal(self.tensor(decoder.head), self.tensor(decoder.embedding))

    def tensor(self, name: str) -> Tensor:
        """As `ShardReader.tensor`, by the class's name."""
        parts = [super(DenseReader, self).tensor(stored) for stored in self.decoder.stored.get(name, (name,))]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def projection(self, layer: int, part: str) -> Tensor:
        """Gate or up (F, D), or down (D, F), of a layer's FFN, with the factor that the FFN gives it."""
        plan, weight = self.decoder.ffn, self.tensor(self.decoder.weight(layer, part))
        rows, scale = plan.rows(part), plan.scale(part)
        if rows.part != "whole":
            weight = weight[rows.of(len(weight))].clone()  # a view would keep the other half in memory
        return weight if scale == 1.0 else (weight.float() * scale).to(weight.dtype)

    def projections(self, layer: int) -> Iterator[Tensor]:
        """Gate, up and down of a layer's FFN, each read when it is asked for; without an FFN, of no neurons."""
        if not self.decoder.has_ffn(layer):
            none_FD = torch.empty(0, self.decoder.hidden)
            return iter((none_FD, none_FD, none_FD.T))
        return (self.projection(layer, part) for part in PROJECTIONS)

    def _entry(self, name: str) -> Entry:
        return super()._entry(name if name in self._entries else self.decoder.stored.get(name, (name,))[0])


def _dequantise(entry: PackedEntry, parts: Mapping[str, Tensor]) -> Tensor:
    """Decode the stored tensors of one weight.

    Numerics: 4 bits exactly as bitsandbytes decodes them, to the format before quantisation; int8 in fp32, then
        rounded once; FP8 as transformers decodes it, in fp32, then rounded once.
    """
    if entry.kind == "fp8":
        return _scaled(parts["weight"], parts["scale"], entry.block).to(torch_dtype(entry.dtype))
    functional = import_bitsandbytes(f"a checkpoint stored in {entry.kind}").functional
    plain: Tensor
    if entry.kind == "int8":
        plain = functional.int8_vectorwise_dequant(parts["weight"], parts["SCB"])
    else:
        described = {key: part for key, part in parts.items() if key != "weight"}
        state = functional.QuantState.from_dict(described, torch.device("cpu"))
        # Distributed training may store packed bytes under another dtype.
        plain = functional.dequantize_4bit(parts["weight"].view(torch.uint8).view(-1, 1), state)
    return plain.to(torch_dtype(entry.dtype))


def _scaled(weight: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """FP8 weights times the scale of their block, in fp32; the last blocks may be smaller."""
    rows_RC = weight.float().view(-1, weight.shape[-1])
    rows, columns = rows_RC.shape
    scales = scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales
    grid = scales.float().view(-(-rows // block[0]), -(-columns // block[1]))
    for first, row_scales in enumerate(grid.unbind()):
        part = rows_RC[first * block[0] : (first + 1) * block[0]]
        part *= row_scales.repeat_interleave(block[1])[:columns]
    return rows_RC.view(weight.shape)


class ShardWriter(AbstractContextManager["ShardWriter"]):
    """Collects tensors and writes each full shard; as a context manager, closes on success, removes shards on failure.

    Memory: one shard and one tensor.
    """

    def __init__(self, folder: Path, max_shard_bytes: int = 256 * 2**20) -> None:
        """Create the folder; shards have temporary names until `close`."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._max_shard_bytes = folder, max_shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._pointers: set[int] = set()
        self._shards: list[tuple[Path, list[str]]] = []  # path and names of its tensors
        self._names: set[str] = set()
        # The disk works while the next shard is made.
        self._disk, self._flushed = ThreadPoolExecutor(1), list[Future[None]]()

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        """Close after success; after a failure remove the shards."""
        with self._disk:
            if kind is None:
                self.close()
                return
        for path, _names in self._shards:
            path.unlink(missing_ok=True)

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor, which must not change until its shard is written. Raises CheckpointError: the name is taken."""
        if name in self._names:
            raise CheckpointError(f"tensor {name} was already written", where=str(self._folder))
        self._names.add(name)
        if self._pending_bytes + tensor.nbytes > self._max_shard_bytes:
            self._flush()
        own = tensor.detach().cpu().contiguous()
        if own.data_ptr() in self._pointers:
            # safetensors refuses two names for one memory.
            own = own.clone()
        self._pointers.add(own.data_ptr())
        self._pending[name] = own
        self._pending_bytes += own.nbytes

    def close(self) -> None:
        """Write the last shard, give all shards their final names, and write the index."""
        self._flush()
        for flushed in self._flushed:
            flushed.result()
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
        """Write the pending tensors as a shard and check its header."""
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
        given = {name: (tuple(tensor.shape), stored_name(tensor.dtype)) for name, tensor in self._pending.items()}
        found = {name: (entry.shape, entry.dtype) for name, entry in read_header(path).items()}
        if wrong := sorted(name for name in found.keys() | given if found.get(name) != given.get(name)):
            raise CheckpointError(f"what was written is not what was given: {', '.join(wrong[:3])}", where=str(path))
        self._flushed.append(self._disk.submit(sync, path))
        self._pending, self._pending_bytes, self._pointers = {}, 0, set()
