"""Running sums of a scan, the interface of their stores, and the store in local files."""

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


def list_differences(held: str | bytes, wanted: str) -> str:
    """Names of the facts that differ between two identities of a scan, which are JSON objects."""
    try:
        theirs, ours = dict(json.loads(held)), json.loads(wanted)
    except (ValueError, TypeError, RecursionError):
        return "everything"
    return ", ".join(name for name in sorted(theirs.keys() | ours.keys()) if theirs.get(name) != ours.get(name))


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


class LocalStore(SumStore):
    """The sums of one worker in `folder/sums.<worker>.safetensors`.

    Each flush replaces the file atomically. Sums and batch numbers are in the same file, so that no batch is lost or
    counted twice.
    """

    def __init__(
        self,
        folder: Path,
        shapes: Shapes,
        *,
        identity: Mapping[str, Any],
        every: float,
        worker: int = 0,
        workers: int = 1,
        fresh: bool = False,
    ) -> None:
        """Load the sums of a killed run from `folder`, or start from zero; `every`: seconds between flushes.

        If an earlier run had more workers, worker 0 takes over the sums of the extra ones, unless their batches have
        been read again since. `fresh` deletes this worker's file; the pipeline cleans only the leading machine.
        Raises ContractError: the folder holds sums of another identity.
        """
        self.path = folder / f"sums.{worker}.safetensors"
        self.identity, self.shapes = json.dumps(identity, sort_keys=True), shapes
        if fresh:
            self.path.unlink(missing_ok=True)
        super().__init__(self._load(self.path) if self.path.exists() else empty_sums(shapes), every)
        self.inherited: list[ScanSums] = []
        left = [path for path in sorted(folder.glob("sums.*.safetensors")) if int(path.name.split(".")[1]) >= workers]
        for part in map(self._load, left if worker == 0 else ()):
            if not part.done & self.done():
                self.inherited.append(part)

    def forget(self) -> None:
        """Reset the sums to zero."""
        self.sums = empty_sums(self.shapes)

    def done(self) -> set[int]:
        """Batches in this worker's sums and in those it took over."""
        return self.sums.done.union(*(part.done for part in self.inherited))

    def flush(self) -> None:
        """Replace the file with the current sums."""
        facts = {"identity": self.identity, "counters": self.sums.counters, "done": sorted(self.sums.done)}
        save_tensors(self.path, self.sums.tensors, **facts)
        self.last = time.monotonic()

    def collect(self) -> ScanSums:
        """This worker's sums and those it took over."""
        if not self.inherited:
            return self.sums
        total = empty_sums(self.shapes)
        for part in (self.sums, *self.inherited):
            total.add(part)
        return total

    def _load(self, path: Path) -> ScanSums:
        do = f"{START_OVER}; or the code that began this scan"
        try:
            tensors, facts = load_tensors(path)
            identity, counters = str(facts["identity"]), {name: float(n) for name, n in facts["counters"].items()}
            sums = ScanSums(tensors, counters, {*facts["done"]})
        except (CheckpointError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise ContractError(f"unfinished sums cannot be read: {error}", where=str(path), do=do) from error
        shapes = {name: (tuple(value.shape), value.dtype) for name, value in sums.tensors.items()}
        if identity == self.identity and shapes == dict(self.shapes):
            return sums
        differences = list_differences(identity, self.identity) or "tensors"
        raise ContractError(f"unfinished sums are of a scan with another {differences}", where=str(path), do=do)
