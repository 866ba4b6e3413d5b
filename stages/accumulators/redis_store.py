"""Running sums in a Redis server that many workers write to; each batch counts once or not at all.

A flush is one script that marks its batches as done and queues its sums in chunks, or refuses if a batch is done
already. Then one script per chunk adds it to the hashes, in the background, because adding all chunks takes the server
seconds; workers also add the chunks of dead workers. If the server loses its last second, it loses marks and sums
together.

Sums can be exported to a file and imported again. The file has the format of `store=local`: an unfinished scan resumes
from it under the name `sums.0.safetensors`. It also holds the names of the weights, which are part of the Redis keys.
"""

import json
import logging
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

from instruments.errors import ContractError, UserError
from stages.accumulators.config import StoreConfig
from stages.accumulators.redis_connection import connect, in_words
from stages.accumulators.redis_namespace import BITS, FIELDS, PROJECTIONS, Namespace, WeightNames, pack_identity
from stages.accumulators.sums import ScanSums, Shapes, SumStore, empty_sums, load_sums, save_sums

if TYPE_CHECKING:
    from redis import Redis

COMMIT_TRIES = 5
READ_TRIES = 5

logger = logging.getLogger(__name__)


class RedisStore(SumStore):
    """The sums of all workers in one namespace of one server."""

    shared = True

    def __init__(self, namespace: Namespace, *, every: float) -> None:
        """Resume from the sums of a namespace that this scan has claimed; `every`: seconds between flushes."""
        super().__init__(empty_sums(namespace.shapes), every)
        self.namespace = namespace
        self.stop = Event()
        # Begins with what dead workers left.
        self.adder = ThreadPoolExecutor(1, "redis")
        self.adding = self.adder.submit(self._add_pending)

    def done(self) -> set[int]:
        """Batches that any worker has flushed."""
        with in_words(self.namespace.place):
            return self.namespace.done()

    def due(self) -> bool:
        """Whether the last flush was `every` seconds ago, and the server has added it."""
        return super().due() and self.adding.done()

    def flush(self) -> None:
        """Commit what was added, or drop it where another worker has one of its batches.

        Raises:
            UserError: the server cannot be reached or refuses; nothing is lost on it.
        """
        self._finish_adding()
        if self.sums.done:
            with in_words(self.namespace.place):
                self._commit()
            self.sums = empty_sums(self.namespace.shapes)
        self.last = time.monotonic()

    def collect(self) -> ScanSums:
        """The sums of all workers, dead ones included.

        Raises:
            ContractError: other workers flush so often that no read is consistent, or another program changed the sums.
        """
        for _ in range(READ_TRIES):
            before = self.done()
            self._finish_adding()
            with in_words(self.namespace.place):
                sums, totals = self.namespace.read()
            # A flush committed since then would be in the done batches, but not or only partly in the sums.
            if sums.done == before:
                self.namespace.require_intact(sums, totals)
                return sums
        what = "other workers flush to these sums faster than they can be read"
        do = "the same command again once their scan has ended, or with a larger store.checkpoint_every"
        raise ContractError(what, where=self.namespace.place, do=do)

    def close(self) -> None:
        """Close the connection. Pending chunks are left to the next worker."""
        self.stop.set()
        self.adder.shutdown(wait=True)
        self.namespace.client.close()

    def _commit(self) -> None:
        for _ in range(COMMIT_TRIES):
            answer = self.namespace.commit(self.sums)
            if answer == "refused":
                logger.info("some of batches %d to %d are counted already", min(self.sums.done), max(self.sums.done))
            if answer != "lost":
                self.adding = self.adder.submit(self._add_pending)
                return
            # The server has restarted and lost its last seconds or all of its data.
            self.namespace.claim()
        what = f"the Redis server lost what it was sent, {COMMIT_TRIES} times in a row"
        do = "see its log and its maxmemory, then the same command again"
        raise UserError(what, where=self.namespace.place, do=do)

    def _add_pending(self) -> None:
        while not self.stop.is_set() and self.namespace.apply():
            pass

    def _finish_adding(self) -> None:
        """Add all pending chunks; repeats in this thread what the other one failed to do, for its error."""
        wait([self.adding])
        with in_words(self.namespace.place):
            self._add_pending()


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
    # Scans of other inputs have other fingerprints.
    prefix = f"tiny_onn:{label}:{identity['scan']}:" if store.namespace is None else store.namespace
    namespace = Namespace(client, prefix, pack_identity(identity, shapes, weights), place)
    with in_words(namespace.place):
        if fresh:
            namespace.clear()
        namespace.claim()
    return RedisStore(namespace, every=store.checkpoint_every)


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
    if strange := sorted(sums.tensors.keys() ^ {*FIELDS, BITS}):
        what = f"this file holds no sums of a scan: {strange[0]} is missing or unknown"
        raise ContractError(what, where=str(path), do="a file that python -m pipeline.store export wrote")
    # Default: the weight names of transformers' decoders.
    weights = content.get("weights") or [
        {part: f"model.layers.{layer}.mlp.{part}_proj.weight" for part in PROJECTIONS}
        for layer in range(len(sums.tensors[BITS]))
    ]
    shapes = {name: (tuple(value.shape), value.dtype) for name, value in sums.tensors.items()}
    namespace = Namespace(client, prefix, pack_identity(json.loads(content["identity"]), shapes, weights), place)
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
