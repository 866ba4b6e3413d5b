"""Running sums of a scan, and the local files that keep them."""

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from instruments.durable import whole_file
from instruments.errors import ContractError
from stages.accumulators.config import START_OVER

# Shape and number format of each tensor.
Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]

# How two parts of a scan become one; every other tensor is added.
_COMBINE = {"max_abs": torch.maximum, "bits_LRf": torch.bitwise_or}


@dataclass
class ScanSums:
    """What a part of the scan has found.

    `tensors` are (L, F) sums, float64, but for max_abs (a maximum), active_count (int64) and bits_LRf (uint8: packed
    activation bits of the reservoir's tokens; rows of tokens not read are zero). `counters` are plain sums. `done` are
    the numbers of the batches that are in it: two parts may be added when they share none.
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
    """Nothing, in tensors of the given shapes and number formats."""
    return ScanSums({name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()})


def total_of(parts: Iterable[ScanSums], shapes: Shapes) -> ScanSums:
    """All parts together."""
    total = empty_sums(shapes)
    for part in parts:
        total.add(part)
    return total


def save_sums(path: Path, sums: ScanSums, facts: Mapping[str, Any]) -> None:
    """Write sums and further facts, all of it or nothing."""
    content = {**facts, "counters": sums.counters, "done": sorted(sums.done), "digest": _digest(sums)}
    with whole_file(path) as file:
        save_file(sums.tensors, file, metadata={"facts": json.dumps(content)})


def load_sums(path: Path) -> tuple[ScanSums, dict[str, Any]]:
    """What `save_sums` wrote, and its facts.

    Raises:
        ContractError: there is no such file, or it is damaged.
    """
    do = "a file that python -m pipeline.store export wrote"
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - safe_open is no dict
            facts: dict[str, Any] = json.loads((file.metadata() or {})["facts"])
        sums = ScanSums(tensors, {name: float(count) for name, count in facts["counters"].items()}, set(facts["done"]))
        intact = facts["digest"] == _digest(sums) and isinstance(json.loads(facts["identity"]), dict)
    except (OSError, SafetensorError, AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ContractError(f"this file holds no sums of a scan: {error}", where=str(path), do=do) from error
    if not intact:
        raise ContractError("this file of sums is damaged: its content has another digest", where=str(path), do=do)
    return sums, facts


def _digest(sums: ScanSums) -> str:
    counters = sorted((name, float(count)) for name, count in sums.counters.items())
    digest = blake2b(json.dumps([counters, sorted(sums.done)]).encode(), digest_size=16)
    for name, value in sorted(sums.tensors.items()):
        digest.update(f"{name} {list(value.shape)}".encode())
        digest.update(value.contiguous().numpy().data)
    return digest.hexdigest()


def list_differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """One entry for each fact that is not the same."""
    return [
        f"{name} {theirs.get(name, 'unset')} (here {ours.get(name, 'unset')})"
        for name in sorted(theirs.keys() | ours.keys())
        if theirs.get(name) != ours.get(name)
    ]


class LocalStore:
    """The sums of one worker in `folder/sums.<worker>.safetensors`.

    The file is replaced atomically, so a reader finds the old state or the new one, never half of one. The sums and the
    batches that are in them stand in the same file: nothing is lost or counted twice.
    """

    shared = False

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
        """Go on from what a killed run left, or start from nothing.

        Args:
            folder: of this fingerprint's unfinished work.
            shapes: of the sums.
            identity: what must be the same for sums to be added up.
            every: seconds between flushes.
            worker: number of this process.
            workers: of how many. What higher-numbered workers of an earlier run left is taken over by worker 0, unless
                its batches have been read again since.
            fresh: forget what this worker left here; of several machines only the leading worker's is cleaned before.

        Raises:
            ContractError: the folder holds sums of another identity.
        """
        self.path = folder / f"sums.{worker}.safetensors"
        self.identity, self.every = json.dumps(identity, sort_keys=True), every
        self.last = time.monotonic()
        self.shapes = shapes
        if fresh:
            self.path.unlink(missing_ok=True)
        self.sums = self._load(self.path) if self.path.exists() else empty_sums(shapes)
        self.inherited: list[ScanSums] = []
        left = [path for path in sorted(folder.glob("sums.*.safetensors")) if _worker_of(path) >= workers]
        for part in map(self._load, left if worker == 0 else ()):
            if not part.done & self.done():
                self.inherited.append(part)

    def forget(self) -> None:
        """Start from nothing: another worker has these batches."""
        self.sums = empty_sums(self.shapes)

    def done(self) -> set[int]:
        """Batches in this worker's file, and in those it took over."""
        return self.sums.done.union(*(part.done for part in self.inherited))

    def due(self) -> bool:
        """Whether the last flush was `every` seconds ago."""
        return time.monotonic() - self.last >= self.every

    def flush(self) -> None:
        """Replace the file by the state of now."""
        save_sums(self.path, self.sums, {"identity": self.identity})
        self.last = time.monotonic()

    def collect(self) -> ScanSums:
        """This worker's sums and those it took over."""
        return total_of([self.sums, *self.inherited], self.shapes) if self.inherited else self.sums

    def close(self) -> None:
        """Nothing is held open."""

    def _load(self, path: Path) -> ScanSums:
        try:
            sums, facts = load_sums(path)
        except ContractError as error:
            raise ContractError(
                f"unfinished sums cannot be read: {error.what}", where=error.where, do=_START_OVER
            ) from error
        if facts["identity"] != self.identity:
            differences = list_differences(json.loads(facts["identity"]), json.loads(self.identity))
            what = f"unfinished sums are of a scan with {', '.join(differences)}"
            raise ContractError(what, where=str(path), do=_START_OVER)
        found = {name: (tuple(value.shape), value.dtype) for name, value in sums.tensors.items()}
        if found != dict(self.shapes):
            raise ContractError(
                "unfinished sums have other tensors",
                where=str(path),
                do=f"{START_OVER}; or the code that began this scan",
            )
        return sums


_START_OVER = f"{START_OVER}; or the code that began this scan"


def _worker_of(path: Path) -> int:
    return int(path.name.split(".")[1])
