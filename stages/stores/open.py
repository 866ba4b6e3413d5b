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


@contextmanager
def open_store(store: StoreConfig, place: StorePlace, shapes: Shapes) -> Iterator[SumStore]:
    """The store, closed afterwards. Raises UserError: it cannot be reached, or holds something else."""
    with closing(_make(store, place, shapes)) as keeper:
        yield keeper


def _make(store: StoreConfig, place: StorePlace, shapes: Shapes) -> SumStore:
    rank, world = place.workers.rank, place.workers.world
    return LocalStore(
        place.scratch, shapes, identity=place.identity, every=store.checkpoint_every, worker=rank, workers=world
    )
