"""Read the tensors of a dump, join those of several processes, compare two dumps."""

import math
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path

import torch
from tabulate import tabulate
from torch import Tensor
from tqdm import tqdm

from instruments.distance import measure_distance
from instruments.errors import CheckpointError, ConfigError, ContractError
from instruments.safetensors_files import EntryReader, TensorEntry, checksum_of, read_header
from instruments.tensor_dump.index import STORED, Listing, Placement, Source, TensorRecord


class DumpReader(Listing):
    """A dump, complete or still being written; all tensors that it lists are complete."""

    def __init__(self, folder: Path | str) -> None:
        """Read the indices. Raises ContractError."""
        super().__init__(folder)
        self._shards: dict[str, dict[str, TensorEntry]] = {}
        self._files = EntryReader()

    def __enter__(self) -> "DumpReader":
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        self._files.close()

    def load(self, record: TensorRecord) -> Tensor:
        """A private copy on the CPU. Raises ContractError: bytes not kept, or a missing or damaged file."""
        entry = self._entry(record)
        try:
            tensor = self._files.read(entry, str(record.key))
        except CheckpointError as error:
            raise self._refuse(record, f"cannot be read: {error.what}") from error
        if (tuple(tensor.shape), str(tensor.dtype)) != (record.shape, f"torch.{record.dtype}"):
            found, said = f"{tensor.dtype} {list(tensor.shape)}", f"{record.dtype} {list(record.shape)}"
            raise self._refuse(record, f"is {found} in its file, the index says {said}")
        if checksum_of(tensor) != record.checksum:
            raise self._refuse(record, "is damaged: its bytes do not match the checksum of the index")
        return tensor

    def _entry(self, record: TensorRecord) -> TensorEntry:
        """Location of the bytes. Raises ContractError."""
        if record.status != STORED:
            do = "dump with keep=tensors, when_full=block or more memory_mib"
            raise self._refuse(record, f"has no bytes: its status is {record.status}", do)
        name, key = str(record.file), str(record.key)
        try:
            if name not in self._shards:
                self._shards[name] = read_header(self.folder / name)
        except CheckpointError as error:
            raise self._refuse(record, f"cannot be read: {error.what}") from error
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
            what = f"{record.source.module} {record.source.tensor}: tokens of context-parallel processes are not joined"
            do = "reader.load(record): what each process has, in its own order of tokens"
            raise ContractError(what, where=str(self.folder), do=do)
        parts, shape = self.parts_of(record), record.placement.global_shape
        first = self.load(record)
        # Check that the files hold enough values before the size in the index is allocated.
        held = sum(prod(self._entry(part).shape) for part in parts if part.status == STORED)
        if held < prod(shape):
            raise self._incomplete(record, parts)
        joined, covered = torch.empty(shape, dtype=first.dtype), torch.zeros(shape, dtype=torch.bool)
        for part in parts:
            for area, piece in _lay_out(self.load(part), part.placement):
                if joined[area].shape != piece.shape:
                    raise self._incomplete(record, parts)
                joined[area] = piece
                covered[area] = True
        if not covered.all():
            raise self._incomplete(record, parts)
        return joined

    def _incomplete(self, record: TensorRecord, parts: Sequence[TensorRecord]) -> ContractError:
        ranks = ", ".join(str(part.rank) for part in parts)
        return ContractError(
            f"{record.source.module} {record.source.tensor}: the parts of ranks {ranks} are not the whole of "
            f"{list(record.placement.global_shape)}",
            where=str(self.folder),
            do="copy the indices and files of all processes into one folder, or dump with ranks=null",
        )

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


Difference = tuple[Source, float, float, float]


def find_difference(source: Source, a: Tensor, b: Tensor) -> Difference | None:
    """How `b` differs from `a`: relative L2, largest distance, cosine; None if both have equal bytes or no values.

    NaN where shapes differ or a value is not finite.
    """
    if a.shape != b.shape:
        return source, math.nan, math.nan, math.nan
    bits = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (a, b)]  # NaN equals itself; 0 differs from −0
    if not a.numel() or (a.dtype == b.dtype and torch.equal(*bits)):
        return None
    found = measure_distance(a, b)
    if found.nonfinite or found.reference_nonfinite:
        return source, math.nan, math.nan, math.nan
    return source, found.normalised_l2, found.max_abs, found.cosine


COLUMNS = ("module", "tensor", "step", "relative L2", "largest", "cosine")
_WORST = 10


def compare_folders(first: Path, second: Path, tolerance: float) -> tuple[bool, str]:
    """Whether all common tensors agree within `tolerance`, and a text with the first and the largest differences.

    Tensors of the same process, step, microbatch, call, module and name are compared by relative L2 distance; with
    tolerance 0 any bit counts. Raises ConfigError: the dumps have no tensor in common.
    """
    with DumpReader(first) as ours, DumpReader(second) as theirs:
        mine, others = (
            {(record.rank, record.source): record for record in reader.select(status=STORED)}
            for reader in (ours, theirs)
        )
        common = [key for key in mine if key in others]
        if not common:
            what = "the two dumps have no tensor in common"
            do = "dump the same modules and steps of the same model twice"
            raise ConfigError(what, where=f"{first}, {second}", do=do)
        bar = tqdm(common, desc="compare", leave=False, disable=None)
        found = [find_difference(key[1], ours.load(mine[key]), theirs.load(others[key])) for key in bar]
    differences = [one for one in found if one and not (tolerance and one[1] <= tolerance)]
    text = f"{len(common):,} tensors compared, {len(differences):,} differ"
    text += f" by more than {tolerance:g}\n" if tolerance else "\n"
    only_first, only_second = len(mine) - len(common), len(others) - len(common)
    if only_first or only_second:
        text += f"only in {first}: {only_first:,}; only in {second}: {only_second:,}\n"
    if differences:
        worst = sorted(differences, key=lambda one: -math.inf if math.isnan(one[1]) else -one[1])
        text += f"\nfirst divergence, in the order of capture\n{_table(differences[:1])}\n"
        text += f"\nlargest relative distances\n{_table(worst[:_WORST])}\n"
    return not differences, text


def _table(differences: Sequence[Difference]) -> str:
    rows = [
        (source.module, source.tensor, str(source.step), f"{relative:.3g}", f"{largest:.3g}", f"{cosine:.9f}")
        for source, relative, largest, cosine in differences
    ]
    return tabulate(rows, COLUMNS, disable_numparse=True)
