"""What a dump holds, by its index alone: no tensor is read."""

import json
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from models.dump.index import Index, read_index
from models.dump.records import TensorRecord
from models.errors import ContractError

# What records can be chosen by, beside their own fields.
_SOURCE = ("step", "microbatch", "call", "direction", "recompute", "module", "layer", "layer_type", "tensor")


@dataclass(frozen=True)
class Listing:
    """The indices of all processes of a dump."""

    folder: Path
    indices: tuple[Index, ...]

    @cached_property
    def records(self) -> tuple[TensorRecord, ...]:
        """All, in the order in which they were captured."""
        found = [record for index in self.indices for record in index.records]
        return tuple(sorted(found, key=lambda record: (record.counter, record.rounded_from is not None)))

    @cached_property
    def missing_files(self) -> tuple[str, ...]:
        """Files that the index names and the folder lacks."""
        named = sorted({record.file for record in self.records if record.file is not None})
        return tuple(name for name in named if not (self.folder / name).is_file())

    @property
    def torn(self) -> int:
        """Bytes at the ends of indices that killed processes left."""
        return sum(index.torn for index in self.indices)

    def manifests(self) -> dict[int, dict[str, Any]]:
        """Expected against captured, by rank; of a process that was killed there is none."""
        paths = self.folder.glob("manifest-*.json")
        return {int(path.stem.rpartition("-")[2]): json.loads(path.read_text(encoding="utf-8")) for path in paths}

    def select(self, *, rounded: bool = False, **wanted: object) -> list[TensorRecord]:
        """Records whose fields have these values; a module or name may be a glob, any value a set of values.

        Args:
            rounded: the copies rounded into another number format, instead of the tensors themselves.
            wanted: step, microbatch, call, direction, recompute, module, layer, layer_type, tensor, rank, status,
                quant_type, name.
        """
        chosen = [record for record in self.records if (record.rounded_from is not None) == rounded]
        for field, value in wanted.items():
            chosen = [record for record in chosen if _fits(_value(record, field), value)]
        return chosen


def list_dump(folder: Path) -> Listing:
    """Read the indices of a dump.

    Raises:
        ContractError: there is none, or one is damaged.
    """
    paths = sorted(folder.glob("index-*.jsonl"))
    if not paths:
        raise ContractError("no tensor dump here: no index-*.jsonl", where=str(folder), do="name a dump's folder")
    return Listing(folder, tuple(read_index(path) for path in paths))


def _value(record: TensorRecord, field: str) -> object:
    return getattr(record.source if field in _SOURCE else record, field)


def _fits(value: object, wanted: object) -> bool:
    if isinstance(wanted, str) and isinstance(value, str):
        return fnmatchcase(value, wanted)
    if isinstance(wanted, set | frozenset | tuple | list | range):
        return any(_fits(value, one) for one in wanted)
    return value == wanted
