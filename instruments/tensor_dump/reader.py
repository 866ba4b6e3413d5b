"""Tensors of a dump, read when they are asked for, and joined where processes held parts of them."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor
from tqdm import tqdm

from instruments.errors import CheckpointError, ContractError
from instruments.safetensors_header import TensorEntry, read_header
from instruments.safetensors_reader import EntryReader
from instruments.tensor_dump.index import Listing, list_dump
from instruments.tensor_dump.records import STORED, Placement, TensorRecord


class DumpReader:
    """A dump that was written, or is being written: what it lists is whole."""

    def __init__(self, folder: Path | str) -> None:
        """Read the indices. Raises ContractError."""
        self.listing: Listing = list_dump(Path(folder))
        self._shards: dict[str, dict[str, TensorEntry]] = {}
        self._files = EntryReader()

    def __enter__(self) -> "DumpReader":
        """Files are opened when they are needed."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close them."""
        self._files.close()

    @property
    def records(self) -> Sequence[TensorRecord]:
        """All of them, in the order in which they were captured."""
        return self.listing.records

    def select(self, *, rounded: bool = False, **wanted: object) -> list[TensorRecord]:
        """As `Listing.select`: `reader.select(module="*.q_proj", tensor="input", step={0, 5})`."""
        return self.listing.select(rounded=rounded, **wanted)

    def load(self, record: TensorRecord) -> Tensor:
        """A private copy of one tensor, on the CPU.

        Raises:
            ContractError: its bytes were not kept, its file is missing or is not what was written.
        """
        if record.status != STORED or record.file is None or record.key is None:
            raise ContractError(
                f"{record.name} has no bytes: its status is {record.status}",
                where=str(self.listing.folder),
                do="dump with keep=tensors, when_full=block or more memory_mib",
            )
        try:
            tensor = self._files.read(self._entry(record.file, record.key), record.key)
        except CheckpointError as error:
            raise ContractError(
                f"{record.name} cannot be read: {error.what}",
                where=str(self.listing.folder / record.file),
                do="copy that file here again; all other tensors can be read",
            ) from error
        if (tuple(tensor.shape), tensor.dtype) != (record.shape, getattr(torch, record.dtype)):
            raise ContractError(
                f"{record.name} is {tensor.dtype} {list(tensor.shape)} in its file, the index says {record.dtype} "
                f"{list(record.shape)}",
                where=str(self.listing.folder / record.file),
                do="copy the whole dump again",
            )
        return tensor

    def _entry(self, name: str, key: str) -> TensorEntry:
        path = self.listing.folder / name
        if name not in self._shards:
            if not path.is_file():
                raise CheckpointError(f"{name} is missing", where=str(path))
            self._shards[name] = dict(read_header(path))
        if key not in self._shards[name]:
            raise CheckpointError(f"there is no tensor {key}", do="check that the dump is complete")
        return self._shards[name][key]

    def join(self, record: TensorRecord) -> Tensor:
        """The tensor of which a tensor-parallel process held a part, put together from all of its group.

        Raises:
            ContractError: a process's part is not there, or the tokens are spread by context parallelism.
        """
        if record.parallel.get("cp", (0, 1))[1] > 1 and record.source.tensor != "weight":
            raise ContractError(
                f"{record.source.module} {record.source.tensor}: tokens of context-parallel processes are not joined",
                where=str(self.listing.folder),
                do="reader.load(record): what each process has, in its own order of tokens",
            )
        parts = self.parts_of(record)
        joined = torch.empty(record.placement.global_shape, dtype=getattr(torch, record.dtype))
        covered = torch.zeros(record.placement.global_shape, dtype=torch.bool)
        for part in parts:
            for area, piece in _lay_out(self.load(part), part.placement):
                joined[area] = piece
                covered[area] = True
        if not covered.all():
            ranks = ", ".join(str(part.rank) for part in parts)
            raise ContractError(
                f"{record.source.module} {record.source.tensor}: the parts of ranks {ranks} are not the whole of "
                f"{list(record.placement.global_shape)}",
                where=str(self.listing.folder),
                do="copy the indices and files of all processes into one folder, or dump with ranks=null",
            )
        return joined

    def parts_of(self, record: TensorRecord) -> list[TensorRecord]:
        """The records of the same tensor at all processes of its tensor-parallel group."""
        group = {name: place for name, place in record.parallel.items() if name != "tp"}
        return [
            other
            for other in self.records
            if other.source == record.source
            and other.quant_type == record.quant_type
            and (other.rounded_from is None) == (record.rounded_from is None)
            and {name: place for name, place in other.parallel.items() if name != "tp"} == group
            and (other.rank == record.rank or "tp" in record.parallel)
        ]


def _lay_out(tensor: Tensor, placement: Placement) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
    """Where each piece of a part belongs."""
    axis, count = placement.pieces or (0, 1)
    for number, piece in enumerate(tensor.chunk(count, axis) if count > 1 else [tensor]):
        begins = list(placement.offset)
        if count > 1:
            begins[axis] += number * placement.global_shape[axis] // count
        yield tuple(slice(begin, begin + size) for begin, size in zip(begins, piece.shape, strict=True)), piece


def export_pt(reader: DumpReader, folder: Path) -> int:
    """Write `<name>.pt` for every stored tensor: a dictionary of the tensor and all that its record says.

    `torch.load(path, weights_only=True)` reads them. Returns how many there are.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stored = [record for record in reader.records if record.status == STORED]
    for record in tqdm(stored, desc="export", unit="tensor", disable=None):
        torch.save({"tensor": reader.load(record), **record.to_row()}, folder / f"{record.name}.pt")
    return len(stored)
