"""Read the tensors of a dump."""

import re
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from instruments.errors import CheckpointError, ContractError
from instruments.safetensors_files import EntryReader, TensorEntry, checksum_of, read_header
from instruments.tensor_dump.index import STORED, Manifest, TensorRecord, read_index, read_manifest

if TYPE_CHECKING:
    from torch import Tensor


class DumpReader(EntryReader):
    """A dump, complete or still being written; all tensors that it lists are complete."""

    def __init__(self, folder: Path | str) -> None:
        """Read the indices of all processes. Raises ContractError: there is none, or one is damaged."""
        super().__init__()
        self.folder = Path(folder)
        indices = [read_index(path) for path in sorted(self.folder.glob("index-*.jsonl"))]
        if not indices:
            raise ContractError("no tensor dump here: no index-*.jsonl", where=str(folder), do="name a dump's folder")
        self.ranks = [rank for rank, _records, _torn in indices]
        self.torn = sum(torn for _rank, _records, torn in indices)  # bytes of last lines of killed processes
        found = [record for _rank, records, _torn in indices for record in records]
        self.records = sorted(found, key=lambda record: record.counter)  # in the order of capture
        self._shards: dict[str, dict[str, TensorEntry]] = {}

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

    def select(self, **wanted: object) -> list[TensorRecord]:
        """Records whose fields match; texts may be globs, and a collection matches any of its values.

        Fields: step, microbatch, call, evaluation, direction, module, layer, layer_type, tensor, rank, status,
        quant_type, name.
        """
        chosen = self.records
        for name, value in wanted.items():
            chosen = [record for record in chosen if _fits(_value(record, name), value)]
        return chosen

    def load(self, record: TensorRecord) -> "Tensor":
        """A private copy on the CPU. Raises ContractError: bytes not kept, or a missing or damaged file."""
        try:
            tensor = self.read(self._entry(record), str(record.key))
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


def _value(record: TensorRecord, name: str) -> object:
    return getattr(record.source if hasattr(record.source, name) else record, name)


def _fits(value: object, wanted: object) -> bool:
    if isinstance(wanted, str) and isinstance(value, str):
        return fnmatchcase(value, wanted)
    if isinstance(wanted, set | frozenset | tuple | list | range):
        return any(_fits(value, one) for one in wanted)
    return value == wanted
