"""Running sums in a Redis server that many workers write to; each batch counts once or not at all.

A flush has three steps. (1) The worker stages its sums in chunks that do not count yet. (2) One small script commits
them: it marks the batches as done and the chunks as pending and adds to the totals; it refuses if a batch is already
done. (3) One script per chunk adds it to the hashes and deletes it. Workers also add pending chunks of dead workers. If
the server loses its last second, it loses marks and sums together.

Sums can be exported to a file and imported again. The file has the format of `store=local`: an unfinished scan resumes
from it under the name `sums.0.safetensors`. It also holds the names of the weights, which are part of the Redis keys.
"""

import json
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

from instruments.errors import ContractError, UserError
from stages.accumulators.config import StoreConfig
from stages.accumulators.redis_connection import connect, in_words
from stages.accumulators.redis_layout import PROJECTIONS, WeightNames, columns_of, default_namespace, pack_cache_key
from stages.accumulators.redis_namespace import Namespace
from stages.accumulators.sums import ScanSums, Shapes, SumStore, empty_sums, load_sums, save_sums

if TYPE_CHECKING:
    from redis import Redis

COMMIT_TRIES = 5
READ_TRIES = 5
# Two threads, so that the server need not wait for the next chunk; a pipeline would block other clients.
ADDERS = 2

logger = logging.getLogger(__name__)


class RedisStore(SumStore):
    """The sums of all workers in one namespace of one server."""

    shared = True

    def __init__(self, namespace: Namespace, *, every: float) -> None:
        """Resume from the sums of a namespace that this scan has claimed; `every`: seconds between flushes."""
        super().__init__(empty_sums(namespace.shapes), every)
        self.namespace = namespace
        # Adding takes the server seconds; threads do it while this process scans on.
        self.adders = ThreadPoolExecutor(ADDERS, "redis")
        self.adding: list[Future[None]] = []
        self.stop = Event()

    def take_up(self) -> None:
        """Start to add all pending chunks, those of dead workers included; each chunk is added once."""
        with in_words(self.namespace.place):
            self._start_adding(self.namespace.pending())

    def done(self) -> set[int]:
        """Batches that any worker has flushed."""
        with in_words(self.namespace.place):
            return self.namespace.done()

    def due(self) -> bool:
        """Whether the last flush was `every` seconds ago, and the server has added it."""
        return super().due() and all(part.done() for part in self.adding)

    def flush(self) -> None:
        """Commit what was added, or drop it where another worker has one of its batches.

        Raises:
            UserError: the server cannot be reached or refuses; nothing is lost on it.
        """
        self._wait()
        if self.sums.done:
            with in_words(self.namespace.place):
                names = self._commit(self.sums)
            self._start_adding(names)
            self.sums = empty_sums(self.namespace.shapes)
        self.last = time.monotonic()

    def collect(self) -> ScanSums:
        """The sums of all workers, dead ones included.

        Raises:
            ContractError: other workers flush so often that no read is consistent, or another program changed the sums.
        """
        self._wait()
        for _ in range(READ_TRIES):
            self.take_up()
            self._wait()
            with in_words(self.namespace.place):
                before = self.namespace.done()
                settled = not self.namespace.pending()
                sums, totals = self.namespace.read()
            # A flush committed during the read would be in the done batches, but not or only partly in the sums.
            if settled and sums.done == before:
                self.namespace.require_intact(sums, totals)
                return sums
        what = "other workers flush to these sums faster than they can be read"
        do = "the same command again once their scan has ended, or with a larger store.checkpoint_every"
        raise ContractError(what, where=self.namespace.place, do=do)

    def close(self) -> None:
        """Close the connection. Pending chunks are left to the next worker."""
        self.stop.set()
        self.adders.shutdown(wait=True)
        self.namespace.client.close()

    def _commit(self, part: ScanSums) -> list[str]:
        """Stage and commit; returns the names of the chunks to add."""
        flush = uuid.uuid4().hex
        for _ in range(COMMIT_TRIES):
            names = self.namespace.stage(flush, part)
            answer = self.namespace.commit(names, part)
            if answer == "committed":
                return names
            if answer == "refused":
                logger.info("another worker has some of batches %d to %d", min(part.done), max(part.done))
                return []
            # The server has restarted and lost its last seconds or all of its data.
            self.namespace.claim()
        what = f"the Redis server lost what it was sent, {COMMIT_TRIES} times in a row"
        do = "see its log and its maxmemory, then the same command again"
        raise UserError(what, where=self.namespace.place, do=do)

    def _start_adding(self, names: Sequence[str]) -> None:
        self.adding = [self.adders.submit(self._apply, names[first::ADDERS]) for first in range(ADDERS)]

    def _apply(self, names: Sequence[str]) -> None:
        for name in names:
            if self.stop.is_set():
                return
            self.namespace.apply(name)

    def _wait(self) -> None:
        adding, self.adding = self.adding, []
        with in_words(self.namespace.place):
            for part in adding:
                part.result()


def open_redis_store(
    store: StoreConfig,
    shapes: Shapes,
    *,
    label: str,
    identity: Mapping[str, str],
    weights: WeightNames,
    fresh: bool = False,
) -> RedisStore:
    """Open the store of a scan, for one of any number of workers; arguments as in `open_store`.

    `fresh` first deletes all keys of the namespace; only one worker may set it, before the others open the store.

    Raises:
        ConfigError: the settings name no usable server.
        ContractError: the namespace holds another scan or foreign keys.
        UserError: the server cannot be reached or denies access.
    """
    client, place = connect(store)
    prefix = default_namespace(label, identity["scan"]) if store.namespace is None else store.namespace
    namespace = Namespace(client, prefix, pack_cache_key(identity, shapes, weights), place)
    with in_words(namespace.place):
        if fresh:
            namespace.clear()
        namespace.claim()
    opened = RedisStore(namespace, every=store.checkpoint_every)
    opened.take_up()
    return opened


def export_sums(namespace: Namespace, path: Path) -> ScanSums:
    """Write all sums of a namespace to a file, atomically; adds pending chunks first."""
    with closing(RedisStore(namespace, every=0)) as store:
        sums = store.collect()
    facts = json.loads(namespace.identity)["facts"]
    save_sums(path, sums, {"identity": json.dumps(facts, sort_keys=True), "weights": namespace.weights})
    return sums


def import_sums(client: "Redis", place: str, prefix: str, path: Path) -> ScanSums:
    """Add the sums of a file, from `export_sums` or `store=local`, to a namespace; a repetition changes nothing.

    The namespace `prefix` must be new, or of the same scan with other batches. Returns the sums it then holds.
    Raises ContractError: the file holds no sums, or the namespace holds another scan or a part of the file's batches.
    """
    sums, content = load_sums(path)
    try:
        columns_of(sums.tensors)
        layers = range(len(sums.tensors["sum_abs"]))
    except KeyError as error:
        what = f"this file holds no sums of a scan: {error}"
        raise ContractError(what, where=str(path), do="a file that python -m pipeline.store export wrote") from error
    # Default: the weight names of transformers' decoders.
    weights = content.get("weights") or [
        {part: f"model.layers.{layer}.mlp.{part}_proj.weight" for part in PROJECTIONS} for layer in layers
    ]
    shapes = {name: (tuple(value.shape), value.dtype) for name, value in sums.tensors.items()}
    namespace = Namespace(client, prefix, pack_cache_key(json.loads(content["identity"]), shapes, weights), place)
    with in_words(namespace.place):
        namespace.claim()
        there = namespace.done() & sums.done
    if there and there != sums.done:
        what = (
            f"{len(there)} of the file's {len(sums.done)} batches are in Redis already: the rest cannot be told apart"
        )
        raise ContractError(what, where=f"{path}, {namespace.place}", do="a new namespace")
    with closing(RedisStore(namespace, every=0)) as store:
        if not there:
            store.sums.add(sums)
            store.flush()
        return store.collect()
