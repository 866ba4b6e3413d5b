"""Running sums in a Redis server that many workers write to, each batch in them once or not at all.

A flush has three steps. Its sums are staged, in chunks that nobody counts yet. One small script commits them: it marks
the batches as done and the chunks as pending and adds to the totals, or refuses when one of the batches is done. Then
the chunks are added to the hashes, each by a script that also removes it; a worker that finds pending chunks of a dead
one adds them. A server that forgets its last second forgets it of marks and sums alike.

Sums go from Redis to a file and back: the file is what `store=local` keeps of an unfinished scan, which goes on from it
when it is put in its place as `sums.0.safetensors`. Added to it are the names of the weights, which keys in Redis need.
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
# Two, so that the server has the next chunk when it is through with one; not a pipeline, which would keep others out.
ADDERS = 2

logger = logging.getLogger(__name__)


class RedisStore(SumStore):
    """The sums of all workers, under one namespace of one server."""

    shared = True

    def __init__(self, namespace: Namespace, *, every: float) -> None:
        """Go on with what the namespace, claimed for this scan, holds; `every`: seconds between flushes."""
        super().__init__(empty_sums(namespace.shapes), every)
        self.namespace = namespace
        # Adding takes the server seconds, in which this process scans on.
        self.adders = ThreadPoolExecutor(ADDERS, "redis")
        self.adding: list[Future[None]] = []
        self.stop = Event()

    def take_up(self) -> None:
        """Begin to add what dead workers have committed. A live one's is added once all the same."""
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
        """The sums of all workers, dead ones' included.

        Raises:
            ContractError: other workers flush all the while, so that no reading holds whole flushes only; or somebody
                else changed the sums.
        """
        self._wait()
        for _ in range(READ_TRIES):
            self.take_up()
            self._wait()
            with in_words(self.namespace.place):
                before = self.namespace.done()
                settled = not self.namespace.pending()
                sums, totals = self.namespace.read()
            # A flush committed meanwhile would be among the done batches and not, or not wholly, among the sums.
            if settled and sums.done == before:
                self.namespace.require_intact(sums, totals)
                return sums
        raise ContractError(
            "other workers flush to these sums faster than they can be read",
            where=self.namespace.place,
            do="the same command again once their scan has ended, or with a larger store.checkpoint_every",
        )

    def close(self) -> None:
        """Let go of the server. Committed sums that are not added yet are left to the next worker."""
        self.stop.set()
        self.adders.shutdown(wait=True)
        self.namespace.client.close()

    def _commit(self, part: ScanSums) -> list[str]:
        """Stage and commit; gives the chunks that are to be added."""
        flush = uuid.uuid4().hex
        for _ in range(COMMIT_TRIES):
            names = self.namespace.stage(flush, part)
            answer = self.namespace.commit(names, part)
            if answer == "committed":
                return names
            if answer == "refused":
                logger.info("another worker has some of batches %d to %d", min(part.done), max(part.done))
                return []
            # The server has come back without its last seconds, or without anything.
            self.namespace.claim()
        raise UserError(
            f"the Redis server lost what it was sent, {COMMIT_TRIES} times in a row",
            where=self.namespace.place,
            do="see its log and its maxmemory, then the same command again",
        )

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
    """The store of a scan, alone or with others that scan the same; arguments as of `open_store`.

    With `fresh` all keys of the namespace are deleted first: one worker only may ask for this, before all others.

    Raises:
        ConfigError: the settings name no usable server.
        ContractError: the namespace holds something else.
        UserError: the server cannot be reached or does not let us in.
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
    """Write all sums of a namespace; pending chunks are added first. Replaces the file in one step."""
    with closing(RedisStore(namespace, every=0)) as store:
        sums = store.collect()
    facts = json.loads(namespace.identity)["facts"]
    save_sums(path, sums, {"identity": json.dumps(facts, sort_keys=True), "weights": namespace.weights})
    return sums


def import_sums(client: "Redis", place: str, prefix: str, path: Path) -> ScanSums:
    """Add a file's sums, of `export_sums` or `store=local`, to a namespace; done again it changes nothing.

    The namespace `prefix` is new, or one of the same scan with other batches; what it then holds is returned.

    Raises:
        ContractError: the file is no such file, or the namespace holds another scan or some of the file's batches.
    """
    sums, content = load_sums(path)
    try:
        columns_of(sums.tensors)
        layers = range(len(sums.tensors["sum_abs"]))
    except KeyError as error:
        what = f"this file holds no sums of a scan: {error}"
        raise ContractError(what, where=str(path), do="a file that python -m pipeline.store export wrote") from error
    # Without names in the file, those of transformers' decoders.
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
