"""The store of a scan's sums: local files, or the Redis server that the settings name."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from instruments.errors import ContractError
from stages.accumulators.config import START_OVER, StoreConfig
from stages.accumulators.sums import (
    ScanSums,
    Shapes,
    SumStore,
    empty_sums,
    list_differences,
    load_sums,
    save_sums,
)
from stages.artifacts.job import Job


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
        save_sums(self.path, self.sums, {"identity": self.identity})
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
            sums, facts = load_sums(path)
        except ContractError as error:
            raise ContractError(f"unfinished sums cannot be read: {error.what}", where=error.where, do=do) from error
        what = "unfinished sums have other tensors"
        if facts["identity"] != self.identity:
            differences = list_differences(json.loads(facts["identity"]), json.loads(self.identity))
            what = f"unfinished sums are of a scan with {', '.join(differences)}"
        elif {name: (tuple(value.shape), value.dtype) for name, value in sums.tensors.items()} == dict(self.shapes):
            return sums
        raise ContractError(what, where=str(path), do=do)


@contextmanager
def open_store(
    store: StoreConfig,
    shapes: Shapes,
    job: Job,
    *,
    label: str,
    identity: Mapping[str, str],
    weights: Sequence[Mapping[str, str]],
) -> Iterator[SumStore]:
    """Open this worker's store of a scan, and close it at the end.

    Only sums of equal `identity` are added up; its entry `scan` is the fingerprint. `weights` maps gate, up and down of
    every layer to the name of the weight. Raises UserError: the store cannot be reached, or holds sums of another scan.
    """
    workers, every = job.workers, store.checkpoint_every
    keeper: SumStore | None = None
    if store.kind == "local":
        rank, world = workers.rank, workers.world
        keeper = LocalStore(
            job.scratch, shapes, identity=identity, every=every, worker=rank, workers=world, fresh=job.fresh
        )
    else:
        from stages.accumulators.redis_store import open_redis_store  # noqa: PLC0415 - an optional extra

        claim = partial(open_redis_store, store, shapes, label=label, identity=identity, weights=weights)
        # The leading worker claims the namespace before the others open it.
        keeper = claim(fresh=job.fresh) if workers.leads else None
        workers.broadcast(None)
        keeper = keeper or claim()
    with closing(keeper):
        yield keeper
