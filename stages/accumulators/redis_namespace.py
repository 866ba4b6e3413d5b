"""One scan's keys in Redis and the operations on them; each may be repeated after a lost connection."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from redis import Redis

from instruments.errors import ContractError
from stages.accumulators.redis_layout import (
    BITS,
    LAYOUT_VERSION,
    Keys,
    columns_of,
    entries_to_add,
    entries_to_read,
    pack_chunks,
    unpack_neurons,
)
from stages.accumulators.sums import ScanSums, empty_sums, list_differences

# Seconds after which the server forgets what a dead worker staged but did not commit.
STAGED_FOR = 900
BYTES_AT_ONCE = 2**23
UNITS_READ_AT_ONCE = 2048
KEYS_DELETED_AT_ONCE = 1000


class Namespace:
    """The sums of one scan on one server."""

    def __init__(self, client: "Redis", namespace: str, identity: str, place: str) -> None:
        """Name everything; nothing is sent.

        Args:
            client: of the server.
            namespace: what every key begins with.
            identity: of the scan, as `pack_cache_key` writes it.
            place: the server in words.
        """
        self.client, self.identity, self.keys = client, identity, Keys(namespace)
        self.place = f"{place}, namespace {namespace or '(empty)'}"
        content = json.loads(identity)
        self.weights = content["weights"]
        self.shapes = {name: (tuple(size), getattr(torch, kind)) for name, (size, kind) in content["sums"].items()}
        self.columns = columns_of(self.shapes)
        self._claim, self._commit, self._apply, self._read = (
            client.register_script(Path(__file__).with_name(f"redis_{name}.lua").read_text())
            for name in ("claim", "commit", "apply", "read")
        )

    @property
    def layers(self) -> int:
        """L."""
        return len(self.weights)

    @property
    def width(self) -> int:
        """F."""
        return int(self.shapes[self.columns[0]][0][1])

    def claim(self) -> None:
        """Make the namespace this scan's, or find that it is.

        Raises:
            ContractError: another scan's sums lie there, or keys that no scan made.
        """
        firsts = [f"{prefix}0" for names in self.weights for prefix in self.keys.layer_rows(names)]
        keys = [self.keys.identity, self.keys.done, self.keys.counters, self.keys.pending, *firsts]
        held = self._claim(keys=keys, args=[self.identity])
        if isinstance(held, list):
            raise ContractError(
                f"the Redis key {held[0].decode()} is there, but no scan has begun under this namespace",
                where=self.place,
                do="another store.namespace, or delete what lies under this one",
            )
        if held.decode() != self.identity:
            raise ContractError(
                f"Redis holds sums of a scan with {_differences(held.decode(), self.identity)}",
                where=self.place,
                do="fresh=true, which starts over; another store.namespace; or the code that began this scan",
            )

    def done(self) -> set[int]:
        """Numbers of the batches that are committed."""
        bitmap = np.frombuffer(self._bytes(self.keys.done), np.uint8)
        return set(np.flatnonzero(np.unpackbits(bitmap)).tolist())

    def stage(self, flush: str, part: ScanSums) -> list[str]:
        """Send a part without adding it; gives the names of its chunks."""
        names: list[str] = []
        for chunks in _in_loads(pack_chunks(part, self.columns, self.keys, self.weights)):
            pipeline = self.client.pipeline(transaction=False)
            for chunk in chunks:
                names.append(f"{flush}:{len(names)}")
                pipeline.set(self.keys.chunk(names[-1]), chunk, ex=STAGED_FOR)
            pipeline.execute()
        return names

    def commit(self, names: Sequence[str], part: ScanSums) -> str:
        """Let the staged part count, or not: `redis_commit.lua` says what it answers."""
        keys = [self.keys.identity, self.keys.done, self.keys.counters, self.keys.pending]
        counters = [word for name, count in part.counters.items() for word in (name, repr(float(count)))]
        return str(
            self._commit(
                keys=[*keys, *map(self.keys.chunk, names)],
                args=[self.identity, len(part.done), *sorted(part.done), *counters, *names],
            ).decode()
        )

    def pending(self) -> list[str]:
        """Names of committed chunks that wait to be added."""
        return sorted(_text(name) for name in self.client.smembers(self.keys.pending))

    def apply(self, name: str) -> int:
        """Add a committed chunk to the sums; gives the number of increments, 0 when it has been added."""
        keys = [self.keys.chunk(name), self.keys.pending]
        return int(self._apply(keys=keys, args=[name, *entries_to_add(self.columns)]))

    def read(self) -> ScanSums:
        """All sums, as they are now; what others add meanwhile may be in them by half."""
        sums = empty_sums(self.shapes)
        entries = entries_to_read(self.columns)
        for layer, names in enumerate(self.weights):
            for first in range(0, self.width, UNITS_READ_AT_ONCE):
                count = min(UNITS_READ_AT_ONCE, self.width - first)
                answer = self._read(args=[*self.keys.layer_rows(names), first, count, *entries])
                for name, values_F in zip(self.columns, unpack_neurons(answer, len(self.columns)).T, strict=True):
                    sums.tensors[name][layer, first : first + count] = values_F
            if BITS in self.shapes:
                bits = np.frombuffer(self._bytes(self.keys.bits(layer)), np.uint8)
                sums.tensors[BITS][layer].view(-1)[: len(bits)] = torch.from_numpy(bits.copy())
        counters = self.client.hgetall(self.keys.counters)
        sums.counters = {_text(name): float(count) for name, count in counters.items()}
        sums.done = self.done()
        return sums

    def clear(self) -> None:
        """Delete all of it; the ledger at once and first, so that a deletion cut short leaves nothing believable."""
        fixed = [self.keys.identity, self.keys.done, self.keys.counters, self.keys.pending]
        chunks = [self.keys.chunk(name) for name in self.pending()]
        self.client.delete(*fixed, *chunks, *(self.keys.bits(layer) for layer in range(self.layers)))
        # Neuron 0 goes last: `claim` takes it for a sign that something is left.
        prefixes = [prefix for names in self.weights for prefix in self.keys.layer_rows(names)]
        for last in range(self.width, 0, -KEYS_DELETED_AT_ONCE):
            pipeline = self.client.pipeline(transaction=False)
            for prefix in prefixes:
                neurons = range(last - 1, max(-1, last - 1 - KEYS_DELETED_AT_ONCE), -1)
                pipeline.unlink(*(f"{prefix}{neuron}" for neuron in neurons))
            pipeline.execute()

    def _bytes(self, key: str) -> bytes:
        held = self.client.get(key) or b""
        assert isinstance(held, bytes)
        return held


def find_namespace(client: "Redis", namespace: str, place: str) -> Namespace:
    """The scan that lies under a namespace.

    Raises:
        ContractError: none does, or one of another layout.
    """
    held = client.get(Keys(namespace).identity)
    if held is None:
        what = f"no scan lies under the namespace {namespace or '(empty)'}"
        raise ContractError(what, where=place, do="store.namespace= as the scan was given it")
    try:
        layout = json.loads(held)["layout"]
    except (ValueError, KeyError, TypeError):
        layout = "unknown"
    if layout != LAYOUT_VERSION:
        what = (
            f"what lies under the namespace {namespace or '(empty)'} is of layout {layout}; known is {LAYOUT_VERSION}"
        )
        raise ContractError(
            what, where=place, do="stage=scan with fresh=true, which starts over, or the release that wrote it"
        )
    return Namespace(client, namespace, _text(held), place)


def _text(answer: bytes | str) -> str:
    return answer if isinstance(answer, str) else answer.decode()


def _in_loads(chunks: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Chunks by as many as are sent at once."""
    load: list[bytes] = []
    for chunk in chunks:
        load.append(chunk)
        if sum(map(len, load)) >= BYTES_AT_ONCE:
            yield load
            load = []
    if load:
        yield load


def _differences(held: str, wanted: str) -> str:
    """What differs between two identities, in words."""
    try:
        theirs: dict[str, Any] = json.loads(held)
    except ValueError:
        return "an identity that is no scan's"
    ours = json.loads(wanted)
    words = list_differences(theirs.get("facts", {}), ours["facts"])
    if theirs.get("layout") != ours["layout"]:
        words.append(f"layout {theirs.get('layout', 'unset')} of its fields (here {ours['layout']})")
    words += [f"another {name}" for name in ("sums", "weights") if theirs.get(name) != ours[name]]
    return ", ".join(words)
