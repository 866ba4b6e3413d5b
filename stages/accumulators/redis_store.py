"""Running sums in a Redis server that many workers write to; each batch counts once or not at all.

Each neuron has three hashes, one per projection, `{namespace}param:{weight name}:row:{neuron}`: for its row of
gate_proj and up_proj and its column of down_proj. `sum_act` is the sum of |h| over tokens, `count_act` the number of
tokens for which the neuron is active, `sum_grad_norm` the sum of gradient norms over samples. Divided by `tokens` (the
first two) and `samples` (the third) of `{namespace}scan:totals`, they are means and the frequency. HINCRBYFLOAT keeps
17 decimals after the point: every increment is rounded by up to 5e-18.

A flush is one script that marks its batches in `scan:done`, adds to `scan:totals` and queues its sums in chunks in
`scan:pending`, or refuses if a batch is done already. Then one script per chunk adds it to the hashes, in the
background, because adding all chunks takes the server seconds; workers also add the chunks of dead workers. If the
server loses its last second, it loses marks and sums together.

`scan:totals` also holds the number of batches, and for every sum and layer the total over all neurons, with which
readers verify the sums. `scan:identity` is JSON: the scan's settings, inputs and code. `scan:bits:{layer}` are the
packed activation bits of the reservoir, the rows of all tokens concatenated.
"""

import json
import logging
import re
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from math import prod
from pathlib import Path
from threading import Event

import numpy as np
import torch
from redis import Redis
from torch import Tensor

from instruments.errors import ContractError, NumericsError, UserError
from stages.accumulators.config import START_OVER, StoreConfig
from stages.accumulators.redis_connection import connect, in_words
from stages.accumulators.sums import ScanSums, Shapes, SumStore, empty_sums, list_differences

LAYOUT_VERSION = 4
PROJECTIONS = ("gate", "up", "down")
# Sum of the scan → its fields. Readers take the first one; the others are copies for readers of single rows.
FIELDS = {
    "sum_abs": [(projection, "sum_act") for projection in PROJECTIONS],
    "active_count": [(projection, "count_act") for projection in PROJECTIONS],
    **{f"grad_norm_{projection}": [(projection, "sum_grad_norm")] for projection in PROJECTIONS},
    "sum_sq": [("gate", "sum_sq")],
    "sum_taylor": [("gate", "sum_taylor")],
    "max_abs": [("gate", "max_abs")],  # a maximum, without a total
}
# For redis_apply.lua: projection, field and column, counted from 1.
_PLACES = json.dumps(
    [
        [PROJECTIONS.index(projection) + 1, field, column]
        for column, places in enumerate(FIELDS.values(), start=1)
        for projection, field in places
    ]
)
BITS = "bits_LRf"
COUNTERS = ("tokens", "samples", "loss_sum")
# Neurons per script; adding them blocks the server for about 10 ms.
NEURONS_AT_ONCE = 512
KEYS_AT_ONCE = 5000
# Relative tolerance between a total and its sums, and what one increment may lose.
TOLERANCE, LAST_DECIMAL = 1e-9, 1e-17
# Mean of a sum over a layer's neurons from which one batch keeps five digits.
SMALLEST_MEAN = 1e-12
COMMIT_TRIES = READ_TRIES = 5

# For each layer: gate, up, down → name of the weight.
WeightNames = Sequence[Mapping[str, str]]

logger = logging.getLogger(__name__)


def pack_identity(facts: Mapping[str, object], shapes: Shapes, weights: WeightNames) -> str:
    """Identity of a scan as JSON: its facts, shapes and number formats of its sums, names of its weights."""
    sums = {name: [size, str(kind).removeprefix("torch.")] for name, (size, kind) in shapes.items()}
    content = {**facts, "layout": LAYOUT_VERSION, "sums": sums, "weights": [*map(dict, weights)]}
    return json.dumps(content, sort_keys=True)


class RedisStore(SumStore):
    """The sums of all workers in one namespace of one server."""

    shared = True

    def __init__(self, client: Redis, place: str, prefix: str, identity: str, *, every: float = 0) -> None:
        """Sends nothing to the server.

        `place` names the server in messages, `identity` comes from `pack_identity`; `every`: seconds between flushes.
        """
        content = json.loads(identity)
        self.shapes = {name: (tuple(size), getattr(torch, kind)) for name, (size, kind) in content["sums"].items()}
        super().__init__(empty_sums(self.shapes), every)
        self.client, self.identity = client, identity
        self.place = f"{place}, namespace {prefix or '(empty)'}"
        self.width = int(self.shapes["sum_abs"][0][1])
        # The prefixes of a layer's rows, in the order of PROJECTIONS.
        self.rows = [[f"{prefix}param:{names[part]}:row:" for part in PROJECTIONS] for names in content["weights"]]
        self.row_pattern = re.sub(r"[][*?\\^]", r"\\\g<0>", prefix) + "param:*:row:*"
        self.bits = [f"{prefix}scan:bits:{layer}" for layer in range(len(self.rows))]
        self.ledger = [f"{prefix}scan:{name}" for name in ("identity", "done", "totals", "pending")]
        self.claimed, self.marks, self.totals, self.pending = self.ledger
        self.run_commit, self.run_apply, self.run_read = (
            client.register_script(Path(__file__).with_name(f"redis_{name}.lua").read_text(encoding="utf-8"))
            for name in ("commit", "apply", "read")
        )
        self.adder, self.stop = ThreadPoolExecutor(1, "redis"), Event()
        self.adding: Future[None] | None = None

    def claim(self) -> None:
        """Claim the namespace for this scan, if it is not claimed yet, and begin to add what dead workers left.

        Raises:
            ContractError: the namespace holds another scan's sums, or keys that no scan wrote.
        """
        with in_words(self.place):
            self._claim()
        self.adding = self.adder.submit(self._add_pending)

    def done(self) -> set[int]:
        """Batches that any worker has flushed."""
        with in_words(self.place):
            return {int(batch) for batch in self.client.smembers(self.marks) if batch.isdigit()}

    def due(self) -> bool:
        """Whether the last flush was `every` seconds ago, and the server has added it."""
        return super().due() and (self.adding is None or self.adding.done())

    def flush(self) -> None:
        """Commit what was added, or drop it where another worker has one of its batches.

        Raises:
            NumericsError: a sum is not finite, or too small for 17 decimals.
            UserError: the server cannot be reached or refuses; nothing is lost on it.
        """
        with in_words(self.place):
            self._finish_adding()
            if self.sums.done:
                self._commit()
                self.sums = empty_sums(self.shapes)
                self.adding = self.adder.submit(self._add_pending)
        self.last = time.monotonic()

    def collect(self) -> ScanSums:
        """The sums of all workers, dead ones included.

        Raises:
            ContractError: other workers flush so often that no read is consistent, or another program changed the sums.
        """
        for _ in range(READ_TRIES):
            before = self.done()
            with in_words(self.place):
                self._finish_adding()
                sums, totals = self.read()
            # A flush committed since then would be in the done batches, but not or only partly in the sums.
            if sums.done == before:
                self._require_intact(sums, totals)
                return sums
        what = "other workers flush to these sums faster than they can be read"
        do = "the same command again once their scan has ended, or with a larger store.checkpoint_every"
        raise ContractError(what, where=self.place, do=do)

    def close(self) -> None:
        """Close the connection. Pending chunks are left to the next worker."""
        self.stop.set()
        self.adder.shutdown(wait=True)
        self.client.close()

    def clear(self) -> int:
        """Delete all keys of the scan; returns the number of batches it held.

        The identity changes first and is deleted last, so that nobody accepts what an interrupted deletion leaves.
        """
        with in_words(self.place):
            # Another program may have changed its type; deletion must still work, since it is the remedy.
            batches = int(self.client.scard(self.marks)) if self.client.type(self.marks) == b"set" else 0
            self.client.set(self.claimed, "deleted in part")
            self.client.delete(*self.ledger[1:], *self.bits)
            rows = list(self.client.scan_iter(self.row_pattern, count=KEYS_AT_ONCE))
            for first in range(0, len(rows), KEYS_AT_ONCE):
                self.client.unlink(*rows[first : first + KEYS_AT_ONCE])
            self.client.delete(self.claimed)
            return batches

    def commit(self, part: ScanSums) -> str:
        """Commit a part, whose sums count from then on; returns an answer of `redis_commit.lua`."""
        # Activation bits are the same at each repetition; the script only counts them.
        bits = list(self._send_bits(part.tensors[BITS]))
        totals = {name: repr(value) for name, value in _totals(part).items()}  # repr gives all digits
        flush = json.dumps({"batches": sorted(part.done), "bits": bits, "totals": totals})
        return str(self.run_commit(keys=self.ledger, args=[self.identity, flush, *self._chunks(part)]), "ascii")

    def apply(self) -> int:
        """Add the first pending chunk to the sums; returns the number of chunks that are left."""
        return int(self.run_apply(keys=[self.pending], args=[_PLACES, len(FIELDS)]))

    def read(self) -> tuple[ScanSums, dict[str, float]]:
        """All current sums and totals. They may include a part of a flush; `done` are the batches at the end."""
        sums = empty_sums(self.shapes)
        firsts = [places[0] for places in FIELDS.values()]
        for layer, rows in enumerate(self.rows):
            words = [word for part, field in firsts for word in (rows[PROJECTIONS.index(part)], field)]
            for first in range(0, self.width, NEURONS_AT_ONCE):
                count = min(NEURONS_AT_ONCE, self.width - first)
                values_FC = np.frombuffer(self.run_read(args=[first, count, *words]), "<f8").reshape(count, len(FIELDS))
                for name, values_F in zip(FIELDS, values_FC.T, strict=True):
                    sums.tensors[name][layer, first : first + count] = torch.from_numpy(values_F.copy())
            room = sums.tensors[BITS][layer].view(-1).numpy()
            bits = np.frombuffer(self.client.get(self.bits[layer]) or b"", np.uint8)[: len(room)]  # type: ignore[arg-type]
            room[: len(bits)] = bits
        found: dict[bytes, bytes] = self.client.hgetall(self.totals)  # type: ignore[assignment]
        totals = {str(name, "utf-8", "replace"): _number(value) for name, value in found.items()}
        sums.counters = {name: totals[name] for name in COUNTERS if name in totals}
        sums.done = self.done()
        return sums, totals

    def _require_intact(self, sums: ScanSums, totals: Mapping[str, float]) -> None:
        """Verify sums, read with no chunk pending, against the totals.

        Raises:
            ContractError: another program changed or deleted some of them.
        """
        wanted, lost = _totals(sums), LAST_DECIMAL * self.width * len(sums.done)
        # max_abs has no total.
        wrong = {name for name in FIELDS if not ((sums.tensors[name] >= 0) & sums.tensors[name].isfinite()).all()}
        for name, found in wanted.items():
            total = totals.get(name, 0.0)
            if not abs(found - total) <= TOLERANCE * abs(total) + lost:  # also if one is NaN
                wrong.add(name)
        if sums.done:  # totals that no scan counts, or that are missing
            wrong |= totals.keys() ^ (wanted.keys() | set(COUNTERS))
        if wrong:
            what = f"sums in Redis were changed by somebody else: {', '.join(sorted(wrong))}"
            raise ContractError(what, where=self.place, do=START_OVER)

    def _claim(self) -> None:
        keys = [*self.ledger[1:], *(f"{prefix}0" for layer in self.rows for prefix in layer)]
        found = next(filter(self.client.exists, keys), None)
        if found is None:
            self.client.set(self.claimed, self.identity, nx=True)
        held = self.client.get(self.claimed)  # another worker's claim, perhaps, whose sums were found
        if held is None:
            what = f"the Redis key {found} is there, but no scan has begun under this namespace"
            raise ContractError(what, where=self.place, do="another store.namespace, or delete all keys under this one")
        if held != self.identity.encode():
            what = f"Redis holds sums of a scan with another {list_differences(held, self.identity)}"
            do = f"{START_OVER}; another store.namespace; or the code that began this scan"
            raise ContractError(what, where=self.place, do=do)

    def _commit(self) -> None:
        _check_sums(self.sums)
        for _ in range(COMMIT_TRIES):
            answer = self.commit(self.sums)
            if answer == "refused":
                logger.info("some of batches %d to %d are counted already", min(self.sums.done), max(self.sums.done))
            if answer != "lost":
                return
            # The server has restarted and lost its last seconds or all of its data.
            self._claim()
        what = f"the Redis server lost what it was sent, {COMMIT_TRIES} times in a row"
        raise UserError(what, where=self.place, do="see its log and its maxmemory, then the same command again")

    def _add_pending(self) -> None:
        while not self.stop.is_set() and self.apply():
            pass

    def _finish_adding(self) -> None:
        """Add all pending chunks; repeats in this thread what the other one failed to do, for its error."""
        wait([self.adding] if self.adding else [])
        self._add_pending()

    def _chunks(self, part: ScanSums) -> Iterator[bytes]:
        """The neurons layer by layer: number of the first neuron, zero-terminated key prefixes, rows of doubles."""
        for layer, prefixes in enumerate(self.rows):
            rows_FC = np.stack([part.tensors[name][layer].double().numpy() for name in FIELDS], axis=1, dtype="<f8")
            names = b"".join(prefix.encode() + b"\0" for prefix in prefixes)
            for first in range(0, self.width, NEURONS_AT_ONCE):
                yield struct.pack("<I", first) + names + rows_FC[first : first + NEURONS_AT_ONCE].tobytes()

    def _send_bits(self, bits_LRf: Tensor) -> Iterator[tuple[str, int, int, int]]:
        """Write the bits of the tokens that a part has read: zeros for the others would overwrite other workers' bits.

        Yields the key, first byte, last byte and number of ones of every range.
        """
        bytes_each = bits_LRf.shape[2]
        edges = np.flatnonzero(np.diff(bits_LRf.any(2).any(0).numpy().astype(np.int8), prepend=0, append=0)).tolist()
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            for key, bits_Rf in zip(self.bits, bits_LRf.numpy(), strict=True):
                content = bits_Rf[begin:end]
                self.client.setrange(key, begin * bytes_each, content.tobytes())
                yield key, begin * bytes_each, end * bytes_each - 1, int(np.bitwise_count(content).sum())


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
    opened = RedisStore(client, place, prefix, pack_identity(identity, shapes, weights), every=store.checkpoint_every)
    if fresh:
        opened.clear()
    opened.claim()
    return opened


def _check_sums(part: ScanSums) -> None:
    where = f"stage=scan, batches {min(part.done)} to {max(part.done)}"
    if bad := [name for name in FIELDS if not part.tensors[name].isfinite().all()]:
        what = f"sums that are not finite: {', '.join(bad)}"
        raise NumericsError(what, where=where, do="model.dtype=float32 or bfloat16")
    means = {name: part.tensors[name].double().mean(1) for name in FIELDS}
    if bad := [name for name, mean_L in means.items() if ((mean_L > 0) & (mean_L < SMALLEST_MEAN)).any()]:
        what = f"sums too small for Redis, which keeps 17 decimals: {', '.join(bad)}"
        raise NumericsError(what, where=where, do="store=local")


def _totals(sums: ScanSums) -> dict[str, float]:
    """The fields of `scan:totals` that belong to these sums."""
    totals = {"batches": float(len(sums.done))} | {name: float(count) for name, count in sums.counters.items()}
    for name in FIELDS:
        if name != "max_abs":
            layers = sums.tensors[name].double().sum(1).tolist()
            totals |= {f"{name}:{layer}": total for layer, total in enumerate(layers)}
    return totals


def _number(answer: bytes) -> float:
    try:
        return float(answer)
    except ValueError:
        return float("nan")


MOST_ELEMENTS = 2**34
AVERAGES = ("avg_act", "avg_grad_norm", "freq_act")
# What foreign content raises.
FOREIGN = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)


def write_averages(client: Redis, place: str, prefix: str) -> ScanSums:
    """Write the averages of the sums that the namespace holds now into the same hashes; no scan reads them.

    `avg_act` and `freq_act` are per token, `avg_grad_norm` per sample. Raises: see `_open_namespace`.
    """
    store = _open_namespace(client, place, prefix)
    sums = store.collect()
    counts = [max(sums.counters.get(name, 0), 1) for name in ("tokens", "samples", "tokens")]
    with in_words(place):
        for layer, rows in enumerate(store.rows):
            for projection, row in zip(PROJECTIONS, rows, strict=True):
                fields = ("sum_abs", f"grad_norm_{projection}", "active_count")
                values_3F = [
                    sums.tensors[name][layer].double() / count for name, count in zip(fields, counts, strict=True)
                ]
                with client.pipeline(transaction=False) as pipe:
                    for neuron, values in enumerate(torch.stack(values_3F, dim=1).tolist()):
                        pipe.hset(f"{row}{neuron}", mapping=dict(zip(AVERAGES, values, strict=True)))
                    pipe.execute()
    return sums


def _open_namespace(client: Redis, place: str, prefix: str) -> RedisStore:
    """The store of a namespace.

    Raises ContractError: the namespace holds no scan, or one of another layout; or see `RedisStore.collect`.
    """
    name = prefix or "(empty)"
    with in_words(place):
        held = client.get(f"{prefix}scan:identity")
    if held is None:
        what = f"there is no scan under the namespace {name}"
        raise ContractError(what, where=place, do="--namespace as the scan has in store.namespace")
    try:
        content = json.loads(held)
        sizes = [prod(size) for size, _kind in content["sums"].values()]
        if content["layout"] != LAYOUT_VERSION or not 0 < min(sizes) <= max(sizes) < MOST_ELEMENTS:
            raise ValueError("another layout")
        return RedisStore(client, place, prefix, str(held, "utf-8"))  # type: ignore[arg-type]
    except FOREIGN as error:
        what = f"the scan under the namespace {name} has another layout than {LAYOUT_VERSION}"
        raise ContractError(what, where=place, do=f"{START_OVER}; or the release that wrote it") from error
