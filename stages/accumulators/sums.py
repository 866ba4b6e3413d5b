"""Running sums of a scan, files of them, and the interface of their stores."""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from instruments.errors import CheckpointError, ContractError
from instruments.safetensors_files import load_tensors, save_tensors
from stages.accumulators.config import START_OVER

# Shape and number format of each tensor.
Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]

# How to combine a tensor of two parts of a scan; all others are added.
_COMBINE = {"max_abs": torch.maximum, "bits_LRf": torch.bitwise_or}


@dataclass
class ScanSums:
    """Sums over some batches of a scan.

    `tensors` are (L, F) float64 sums, except max_abs (a maximum), active_count (int64) and bits_LRf (uint8: packed
    activation bits of the reservoir's tokens; zero for tokens not read yet). `counters` are scalar sums. `done` holds
    the numbers of the batches in the sums; only parts with disjoint `done` may be added.
    """

    tensors: dict[str, Tensor]
    counters: dict[str, float] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)

    def add(self, part: "ScanSums") -> None:
        """Add another part in place."""
        assert not self.done & part.done, "a batch would count twice"
        for name, value in part.tensors.items():
            total = self.tensors[name]
            _COMBINE.get(name, torch.add)(total, value.to(total.dtype), out=total)
        for name, count in part.counters.items():
            self.counters[name] = self.counters.get(name, 0) + count
        self.done |= part.done


def empty_sums(shapes: Shapes) -> ScanSums:
    """Sums of zero batches, in tensors of the given shapes and number formats."""
    return ScanSums({name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()})


def save_sums(path: Path, sums: ScanSums, facts: Mapping[str, Any]) -> None:
    """Write sums and further facts to a file, atomically."""
    save_tensors(path, sums.tensors, **facts, counters=sums.counters, done=sorted(sums.done))


def load_sums(path: Path) -> tuple[ScanSums, dict[str, Any]]:
    """Read the sums and facts that `save_sums` wrote. Raises ContractError: the file is missing or damaged."""
    try:
        tensors, facts = load_tensors(path)
        counters = {name: float(count) for name, count in facts["counters"].items()}
        sums = ScanSums(tensors, counters, {*facts["done"]})
        if not isinstance(json.loads(facts["identity"]), dict):
            raise ValueError("its identity is no object")
    except (CheckpointError, AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        why = error.what if isinstance(error, CheckpointError) else error
        raise ContractError(f"this file holds no sums of a scan: {why}", where=str(path), do=START_OVER) from error
    return sums, facts


def list_differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """One entry for each fact that differs."""
    return [
        f"{name} {theirs.get(name, 'unset')} (here {ours.get(name, 'unset')})"
        for name in sorted(theirs.keys() | ours.keys())
        if theirs.get(name) != ours.get(name)
    ]


class SumStore(ABC):
    """Stores the sums of a scan; each batch counts once or not at all, also after a kill.

    Callers add batches to `sums`; after the next flush they survive a kill.
    """

    # Whether all workers share the storage. If so, `collect` returns the sums of all workers, else of this one.
    shared = False

    def __init__(self, sums: ScanSums, every: float) -> None:
        """`every` is the time between flushes in seconds."""
        self.sums, self.every = sums, every
        self.last = time.monotonic()

    @abstractmethod
    def done(self) -> set[int]:
        """Numbers of the stored batches, as far as this process can see."""

    @abstractmethod
    def flush(self) -> None:
        """Store everything added so far.

        If another worker has stored some of these batches, the store drops all of them; batches then missing from
        `done` are read again.
        """

    @abstractmethod
    def collect(self) -> ScanSums:
        """The sums of every batch in `done`, after a flush."""

    def due(self) -> bool:
        """Whether at least `every` seconds have passed since the last flush."""
        return time.monotonic() - self.last >= self.every

    def close(self) -> None:  # noqa: B027 - local files are not kept open
        """Close connections; sums that were not flushed are lost."""
