"""Read the tensors of a dump, and join those of several processes."""

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cached_property
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from instruments.errors import CheckpointError, ContractError
from instruments.safetensors_files import EntryReader, TensorEntry, checksum_of, read_header
from instruments.tensor_dump.index import STORED, Manifest, Placement, TensorRecord, read_index, read_manifest


class DumpReader:
    """A dump, complete or still being written; all tensors that it lists are complete."""

    def __init__(self, folder: Path | str) -> None:
        """Read the indices of all processes. Raises ContractError: there is none, or one is damaged."""
        self.folder = Path(folder)
        indices = [read_index(path) for path in sorted(self.folder.glob("index-*.jsonl"))]
        if not indices:
            raise ContractError("no tensor dump here: no index-*.jsonl", where=str(folder), do="name a dump's folder")
        self.ranks = [rank for rank, _records, _torn in indices]
        self.torn = sum(torn for _rank, _records, torn in indices)  # bytes of last lines of killed processes
        found = [record for _rank, records, _torn in indices for record in records]
        # In the order of capture.
        self.records = tuple(sorted(found, key=lambda record: (record.counter, record.rounded_from is not None)))
        self._shards: dict[str, dict[str, TensorEntry]] = {}
        self._files = EntryReader()

    def __enter__(self) -> "DumpReader":
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        self._files.close()

    @cached_property
    def missing_files(self) -> tuple[str, ...]:
        """Files that are in the index but not in the folder."""
        named = sorted({record.file for record in self.records if record.file is not None})
        return tuple(name for name in named if not (self.folder / name).is_file())

    def manifests(self) -> dict[int, Manifest]:
        """Manifests by rank; a killed process has none. Raises ContractError."""
        paths = sorted(self.folder.glob("manifest-*.json"))
        ranks = {path: re.fullmatch(r"manifest-(\d{5,18})", path.stem, re.ASCII) for path in paths}
        return {int(found[1]): read_manifest(path) for path, found in ranks.items() if found}

    def select(self, *, rounded: bool = False, **wanted: object) -> list[TensorRecord]:
        """Records whose fields match; texts may be globs, and a collection matches any of its values.

        Args:
            rounded: select the copies rounded to another number format instead of the tensors themselves.
            wanted: step, microbatch, call, evaluation, direction, module, layer, layer_type, tensor, rank, status,
                quant_type, name.
        """
        return [
            record
            for record in self.records
            if (record.rounded_from is not None) == rounded
            and all(_fits(_value(record, name), value) for name, value in wanted.items())
        ]

    def load(self, record: TensorRecord) -> Tensor:
        """A private copy on the CPU. Raises ContractError: bytes not kept, or a missing or damaged file."""
        try:
            tensor = self._files.read(self._entry(record), str(record.key))
        except CheckpointError as error:
            raise self._refuse(record, f"cannot be read: {error.what}") from error
        if (tuple(tensor.shape), str(tensor.dtype)) != (record.shape, f"torch.{record.dtype}"):
            found, said = f"{tensor.dtype} {list(tensor.shape)}", f"{record.dtype} {list(record.shape)}"
            raise self._refuse(record, f"is {found} in its file, the index says {said}")
        if checksum_of(tensor) != record.checksum:
            raise self._refuse(record, "is damaged: its bytes do not match the checksum of the index")
        return tensor

    def _entry(self, record: TensorRecord) -> TensorEntry:
        """Location of the bytes. Raises ContractError, CheckpointError."""
        if record.status != STORED:
            do = "dump with keep=tensors, or more memory_mib"
            raise self._refuse(record, f"has no bytes: its status is {record.status}", do)
        name, key = str(record.file), str(record.key)
        if name not in self._shards:
            self._shards[name] = read_header(self.folder / name)
        if key not in self._shards[name]:
            raise self._refuse(record, f"cannot be read: there is no tensor {key}")
        return self._shards[name][key]

    def _refuse(
        self, record: TensorRecord, what: str, do: str = "copy that file here again; all other tensors can be read"
    ) -> ContractError:
        return ContractError(f"{record.name} {what}", where=str(self.folder / (record.file or "")), do=do)

    def join(self, record: TensorRecord) -> Tensor:
        """The whole tensor, joined from the parts of a tensor-parallel group.

        Raises:
            ContractError: a process's part is missing, or the tokens are split by context parallelism.
        """
        if record.parallel.get("cp", (0, 1))[1] > 1 and record.source.tensor != "weight":
            what = "is one of several context-parallel processes, whose tokens are not joined"
            raise self._refuse(record, what, "reader.load(record): what each process has, in its own order of tokens")
        parts, shape = self.parts_of(record), record.placement.global_shape
        tensors = [self.load(part) for part in parts]
        # The size in the index is allocated only if the files hold as many values.
        fits = prod(shape) <= sum(tensor.numel() for tensor in tensors)
        if fits:
            joined, covered = torch.empty(shape, dtype=tensors[0].dtype), torch.zeros(shape, dtype=torch.bool)
            for part, tensor in zip(parts, tensors, strict=True):
                for area, piece in _lay_out(tensor, part.placement):
                    if fits := fits and joined[area].shape == piece.shape:
                        joined[area], covered[area] = piece, True
        if not fits or not covered.all():
            ranks = ", ".join(str(part.rank) for part in parts)
            do = "copy the indices and files of all processes into one folder, or dump with ranks=null"
            raise self._refuse(record, f"has parts of ranks {ranks}, which are not the whole of {list(shape)}", do)
        return joined

    def parts_of(self, record: TensorRecord) -> list[TensorRecord]:
        """The records of the same tensor from all processes of its tensor-parallel group."""
        kind, group = (record.source, record.quant_type), {**record.parallel, "tp": None}
        return [
            other
            for other in self.select(rounded=record.rounded_from is not None)
            if (other.source, other.quant_type) == kind
            and {**other.parallel, "tp": None} == group
            and (other.rank == record.rank or "tp" in record.parallel)
        ]


def _value(record: TensorRecord, name: str) -> object:
    return getattr(record.source if hasattr(record.source, name) else record, name)


def _fits(value: object, wanted: object) -> bool:
    if isinstance(wanted, str) and isinstance(value, str):
        return fnmatchcase(value, wanted)
    if isinstance(wanted, set | frozenset | tuple | list | range):
        return any(_fits(value, one) for one in wanted)
    return value == wanted


def _lay_out(tensor: Tensor, placement: Placement) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
    """Every piece of a part, with its place in the whole. Raises ContractError: invalid pieces."""
    axis, count = placement.pieces or (0, 1)
    if not (0 <= axis < max(tensor.ndim, 1) and 1 <= count <= max(*tensor.shape[axis : axis + 1], 1, 1)):
        raise ContractError(f"pieces {[axis, count]} do not cut a tensor of {list(tensor.shape)}", do="dump again")
    for number, piece in enumerate(tensor.chunk(count, axis) if count > 1 else [tensor]):
        begins = list(placement.offset)
        if count > 1:
            begins[axis] += number * placement.global_shape[axis] // count
        yield tuple(slice(begin, begin + size) for begin, size in zip(begins, piece.shape, strict=True)), piece
