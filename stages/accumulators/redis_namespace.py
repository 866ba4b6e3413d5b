"""One scan's keys in Redis and operations on them; each operation can be repeated after a lost connection."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from redis import Redis
from torch import Tensor

from instruments.errors import ContractError
from stages.accumulators import redis_layout
from stages.accumulators.config import START_OVER
from stages.accumulators.redis_layout import BITS, GREATEST, LAYOUT_VERSION, TOLERANCE, Keys, sum_marks
from stages.accumulators.sums import ScanSums, empty_sums, list_differences

# Seconds until the server deletes staged chunks that were not committed.
STAGED_FOR = 900
BYTES_AT_ONCE = 2**23
NEURONS_READ_AT_ONCE = 2048
KEYS_DELETED_AT_ONCE, KEYS_LISTED_AT_ONCE = 1000, 5000
MOST_BATCHES = 2**24
MOST_ELEMENTS = 2**34


class Namespace:
    """The sums of one scan on one server."""

    def __init__(self, client: "Redis", namespace: str, identity: str, place: str) -> None:
        """Sends nothing to the server. `identity` comes from `pack_cache_key`; `place` names the server in messages."""
        self.client, self.identity, self.keys = client, identity, Keys(namespace)
        self.place = f"{place}, namespace {namespace or '(empty)'}"
        content = json.loads(identity)
        self.weights = content["weights"]
        self.shapes = {name: (tuple(size), getattr(torch, kind)) for name, (size, kind) in content["sums"].items()}
        self.columns = redis_layout.columns_of(self.shapes)
        self.width = int(self.shapes[self.columns[0]][0][1])
        self._claim, self._commit, self._apply, self._read, self._done = (
            client.register_script(Path(__file__).with_name(f"redis_{name}.lua").read_text(encoding="utf-8"))
            for name in ("claim", "commit", "apply", "read", "done")
        )

    def claim(self) -> None:
        """Claim the namespace for this scan; does nothing if it is already claimed for it.

        Raises:
            ContractError: the namespace holds another scan's sums, or keys that no scan wrote.
        """
        firsts = [f"{prefix}0" for names in self.weights for prefix in self.keys.layer_rows(names)]
        held = self._claim(keys=[*self.keys.ledger, *firsts], args=[self.identity])
        if isinstance(held, list):
            what = f"the Redis key {held[0].decode()} is there, but no scan has begun under this namespace"
            raise ContractError(what, where=self.place, do="another store.namespace, or delete all keys under this one")
        if _text(held) != self.identity:
            what = f"Redis holds sums of a scan with {_differences(_text(held), self.identity)}"
            do = f"{START_OVER}; another store.namespace; or the code that began this scan"
            raise ContractError(what, where=self.place, do=do)

    def done(self) -> set[int]:
        """Numbers of the batches that are committed. Raises ContractError: the marks do not agree with the totals."""
        batches, marks, bitmap = self._done(keys=[self.keys.done, self.keys.totals], args=[MOST_BATCHES // 8])
        done = set(np.flatnonzero(np.unpackbits(np.frombuffer(bitmap or b"", np.uint8))).tolist())
        if bitmap is None or (len(done), sum_marks(done)) != (_number(batches), _number(marks)):
            raise self._tampered("the batches marked as done are not those that were flushed")
        return done

    def stage(self, flush: str, part: ScanSums) -> list[str]:
        """Send a part in chunks without adding it; returns the names of the chunks."""
        names: list[str] = []
        unsent, pipeline = 0, self.client.pipeline(transaction=False)
        for chunk in redis_layout.pack_chunks(part, self.columns, self.keys, self.weights):
            names.append(f"{flush}:{len(names)}")
            pipeline.set(self.keys.chunk(names[-1]), chunk, ex=STAGED_FOR)
            unsent += len(chunk)
            if unsent >= BYTES_AT_ONCE:
                pipeline.execute()
                unsent = 0
        pipeline.execute()
        return names

    def commit(self, names: Sequence[str], part: ScanSums) -> str:
        """Commit a staged part; returns an answer of `redis_commit.lua`."""
        hashes = ((4, redis_layout.total_increments(part, self.columns)), (3, part.counters))  # repr gives all digits
        counts = [word for key, by in hashes for name, count in by.items() for word in (key, name, repr(float(count)))]
        answer = self._commit(
            keys=[*self.keys.ledger, *map(self.keys.chunk, names)],
            args=[self.identity, len(part.done), *sorted(part.done), *counts, *names],
        )
        return _text(answer)

    def pending(self) -> list[str]:
        """Names of committed chunks that are not yet added."""
        return sorted(_text(name) for name in self.client.smembers(self.keys.pending))

    def apply(self, name: str) -> int:
        """Add a committed chunk to the sums; returns the number of increments, 0 if it was already added."""
        keys = [self.keys.chunk(name), self.keys.pending]
        return int(self._apply(keys=keys, args=[name, *redis_layout.entries_to_add(self.columns)]))

    def read(self) -> tuple[ScanSums, dict[str, float]]:
        """All current sums and totals; they may include a part of a flush that is added during the read."""
        sums = empty_sums(self.shapes)
        for layer, names in enumerate(self.weights):
            for first in range(0, self.width, NEURONS_READ_AT_ONCE):
                count = min(NEURONS_READ_AT_ONCE, self.width - first)
                values_CF = self._read_columns(names, first, count)
                for name, values_F in zip(self.columns, values_CF, strict=True):
                    sums.tensors[name][layer, first : first + count] = values_F
            if BITS in self.shapes:
                bits = np.frombuffer(self.client.get(self.keys.bits(layer)) or b"", np.uint8)  # type: ignore[arg-type]
                room = sums.tensors[BITS][layer].view(-1)
                if len(bits) > len(room):
                    raise self._tampered(f"the activation bits of layer {layer} are {len(bits)} bytes of {len(room)}")
                room[: len(bits)] = torch.from_numpy(bits.copy())
        sums.counters, totals = self._numbers(self.keys.counters), self._numbers(self.keys.totals)
        sums.done = self.done()
        return sums, totals

    def _read_columns(self, names: Mapping[str, str], first: int, count: int) -> Tensor:
        """Sums of some neurons, (columns, neurons); NaN where a copy differs.

        Raises:
            ContractError: a row has a field that no scan writes.
        """
        wanted, copied = redis_layout.entries_to_read(self.columns), redis_layout.copied_columns(self.columns)
        rows = self.keys.layer_rows(names)
        answer = self._read(args=[*rows, first, count, *wanted])
        values_FC = redis_layout.unpack_neurons(answer, len(self.columns) + len(copied) + 1)
        if len(strange := values_FC[:, -1].nonzero()[:, 0]):
            neuron = int(strange[0])
            row = f"{rows[int(values_FC[neuron, -1]) - 1]}{first + neuron}"
            raise self._tampered(f"{row} has a field that no scan writes")
        for again, column in enumerate(copied, start=len(self.columns)):
            # A copy may receive the workers' increments in another order, which changes the last digit.
            tolerance = 0.0 if self.columns[column] in GREATEST else TOLERANCE
            same_F = torch.isclose(values_FC[:, again], values_FC[:, column], rtol=tolerance, atol=0.0)
            values_FC[~same_F, column] = torch.nan
        return values_FC[:, : len(self.columns)].T

    def _foreign_rows(self) -> Iterator[str]:
        """Keys that look like rows but belong to no weight or neuron of this scan."""
        begin = self.keys.rows("")[: -len(":row:")]
        weights = {name for names in self.weights for name in names.values()}
        pattern = re.sub(r"[][*?\\^]", r"\\\g<0>", begin) + "*:row:*"
        for key in map(_text, self.client.scan_iter(pattern, count=KEYS_LISTED_AT_ONCE)):
            weight, _, neuron = key.removeprefix(begin).rpartition(":row:")
            belongs = neuron.isdecimal() and neuron == str(int(neuron)) and int(neuron) < self.width
            if not (belongs and weight in weights):
                yield key

    def require_intact(self, sums: ScanSums, totals: Mapping[str, float]) -> None:
        """Verify that sums, read with no chunk pending, are those that the workers committed.

        Raises:
            ContractError: another program changed or deleted some of them.
        """
        if what := redis_layout.find_tampering(sums, self.columns, totals):
            raise self._tampered(what)
        if foreign := next(self._foreign_rows(), None):
            raise self._tampered(f"{foreign} is of no weight or neuron of this scan")

    def _numbers(self, key: str) -> dict[str, float]:
        """A hash of numbers; other values become NaN."""
        return {_text(name): _number(count) for name, count in self.client.hgetall(key).items()}

    def _tampered(self, what: str) -> ContractError:
        what = f"sums in Redis were changed by somebody else: {what}"
        return ContractError(what, where=self.place, do=START_OVER)

    def clear(self) -> int:
        """Delete all keys of the scan; returns the number of batches it held.

        The ledger is deleted first and atomically, so that no reader accepts what an interrupted deletion leaves.
        """
        # Another program may have changed their types; deletion must still work, since it is the remedy.
        kinds = {key: _text(self.client.type(key)) for key in (self.keys.done, self.keys.pending)}
        batches = int(self.client.bitcount(self.keys.done)) if kinds[self.keys.done] == "string" else 0
        pending = self.pending() if kinds[self.keys.pending] == "set" else []
        bits = (self.keys.bits(layer) for layer in range(len(self.weights)))
        self.client.delete(*self.keys.ledger, *map(self.keys.chunk, pending), *bits)
        # Neuron 0 last: `claim` uses it to detect remaining rows.
        prefixes = [prefix for names in self.weights for prefix in self.keys.layer_rows(names)]
        neurons = range(self.width - 1, -1, -1)
        for first in range(0, self.width, KEYS_DELETED_AT_ONCE):
            pipeline = self.client.pipeline(transaction=False)
            for prefix in prefixes:
                pipeline.unlink(*(f"{prefix}{neuron}" for neuron in neurons[first : first + KEYS_DELETED_AT_ONCE]))
            pipeline.execute()
        for key in self._foreign_rows():
            self.client.unlink(key)
        return batches


def find_namespace(client: "Redis", namespace: str, place: str) -> Namespace:
    """The scan in a namespace. Raises ContractError: the namespace holds no scan, or one of another layout."""
    held = client.get(Keys(namespace).identity)
    if held is None:
        what = f"there is no scan under the namespace {namespace or '(empty)'}"
        raise ContractError(what, where=place, do="store.namespace= as the scan was given it")
    layout = "unknown"
    try:
        content = json.loads(held)
        if content["layout"] != LAYOUT_VERSION:
            layout = content["layout"]
        elif all(0 < math.prod(size) < MOST_ELEMENTS for size, _kind in content["sums"].values()):
            return Namespace(client, namespace, _text(held), place)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        pass
    what = f"the scan under the namespace {namespace or '(empty)'} has layout {layout}; known is {LAYOUT_VERSION}"
    raise ContractError(what, where=place, do=f"{START_OVER}; or the release that wrote it")


def _text(answer: bytes | str) -> str:
    return answer if isinstance(answer, str) else answer.decode(errors="replace")


def _number(answer: bytes | str) -> float:
    try:
        return float(answer)
    except ValueError:
        return float("nan")


def _differences(held: str, wanted: str) -> str:
    """The differences between two identities, in words."""
    ours = json.loads(wanted)
    try:
        theirs = json.loads(held)
    except (ValueError, RecursionError):
        theirs = None
    facts = theirs.get("facts", {}) if isinstance(theirs, dict) else None
    if not isinstance(facts, dict):
        return "an identity that is no scan's"
    words = list_differences(facts, ours["facts"])
    if theirs.get("layout") != ours["layout"]:
        words.append(f"layout {theirs.get('layout', 'unset')} of its fields (here {ours['layout']})")
    words += [f"another {name}" for name in ("sums", "weights") if theirs.get(name) != ours[name]]
    return ", ".join(words)
