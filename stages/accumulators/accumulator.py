"""What a scan asks of the place that keeps its sums."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from stages.accumulators.config import StoreConfig
from stages.accumulators.sums import LocalStore, ScanSums, Shapes
from stages.artifacts.job import Workers


class SumStore(Protocol):
    """Keeps the parts of a scan; each batch is in it once or not at all, also after a kill."""

    # Whether all workers write to one place: then `collect` gives the sums of all of them, else this worker's.
    shared: bool

    @property
    def sums(self) -> ScanSums:
        """Where to add batches; they survive a kill after the next flush."""

    def done(self) -> set[int]:
        """Batches that need not be read again, as far as this process can see."""

    def forget(self) -> None:
        """Start from nothing, where not shared: other workers have these batches."""

    def due(self) -> bool:
        """Whether the last flush was `checkpoint_every` seconds ago."""

    def flush(self) -> None:
        """Make everything added so far survive a kill.

        A store that finds some of these batches done by another worker drops all of them: what is then missing from
        `done` is read again.
        """

    def collect(self) -> ScanSums:
        """The sums of every batch in `done`, after a flush."""

    def close(self) -> None:
        """Let go of connections; what was not flushed is lost."""


@dataclass(frozen=True)
class StorePlace:
    """What a store needs to know of the scan."""

    scratch: Path  # folder of this fingerprint's unfinished work
    label: str  # of the model
    identity: Mapping[str, str]  # what must be the same for sums to be added up; `scan` is the fingerprint
    weights: Sequence[Mapping[str, str]]  # for every layer: gate, up, down → name of the weight
    workers: Workers
    fresh: bool  # forget what earlier runs left


@contextmanager
def open_store(store: StoreConfig, place: StorePlace, shapes: Shapes) -> Iterator[SumStore]:
    """The store, closed afterwards. Raises UserError: it cannot be reached, or holds something else."""
    make = _make_redis if store.kind == "redis" else _make_local
    with closing(make(store, place, shapes)) as keeper:
        yield keeper


def _make_local(store: StoreConfig, place: StorePlace, shapes: Shapes) -> SumStore:
    """Files in the scratch folder."""
    return LocalStore(
        place.scratch,
        shapes,
        identity=place.identity,
        every=store.checkpoint_every,
        worker=place.workers.rank,
        workers=place.workers.world,
        fresh=place.fresh,
    )


def _make_redis(store: StoreConfig, place: StorePlace, shapes: Shapes) -> SumStore:
    """A namespace of the server; the leading worker claims it before the others look."""
    from stages.accumulators.redis_store import open_redis_store  # noqa: PLC0415 - an optional extra

    def claim(fresh: bool) -> SumStore:
        return open_redis_store(
            store, shapes, label=place.label, identity=place.identity, weights=place.weights, fresh=fresh
        )

    first = claim(place.fresh) if place.workers.leads else None
    place.workers.follow(None)
    return first or claim(False)
