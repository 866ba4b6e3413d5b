"""The store that the settings ask for."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from stages.contracts.workers import Workers
from stages.stores.config import StoreConfig
from stages.stores.local import LocalStore
from stages.stores.store import SumStore
from stages.stores.sums import Shapes


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
    from stages.stores.redis_store import open_redis_store  # noqa: PLC0415 - an optional extra

    def claim(fresh: bool) -> SumStore:
        return open_redis_store(
            store, shapes, label=place.label, identity=place.identity, weights=place.weights, fresh=fresh
        )

    if place.workers.leads:
        keeper = claim(place.fresh)
        place.workers.follow(None)
        return keeper
    place.workers.follow(None)
    return claim(False)
