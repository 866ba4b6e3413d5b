"""Layout of a scan's sums in Redis: keys, fields and number formats.

Each neuron has three hashes, one per projection, `{namespace}param:{weight name}:row:{neuron}`: for its row of
gate_proj and up_proj and its column of down_proj. `sum_act` is the sum of |h| over tokens, `count_act` the number of
tokens for which the neuron is active, `sum_grad_norm` the sum of gradient norms over samples. Divided by the counters
`tokens` (the first two) and `samples` (the third) of `{namespace}scan:counters`, they are means and the frequency.

HINCRBYFLOAT keeps 17 decimals after the point. An increment below 2^-24 would lose more than 1e-10 of its value, so it
is added to the field with the suffix `_tiny`, in units of 2^-128; the sum is field + 2^-128·tiny field.

Readers verify the sums with the hash `{namespace}scan:totals`: for every sum and layer the total over all neurons,
copies of the counters, the number of batches and the sum of their check numbers. A commit updates it together with the
marks in `scan:done`.
"""

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from instruments.errors import NumericsError
from stages.accumulators.sums import ScanSums

LAYOUT_VERSION = 3  # 2: without totals
PROJECTIONS = ("gate", "up", "down")
# Sum of the scan → its fields. Readers take the first field; the others are copies for readers of single rows, and are
# compared with the first.
FIELDS = {
    "sum_abs": [("gate", "sum_act"), ("up", "sum_act"), ("down", "sum_act")],
    "active_count": [("gate", "count_act"), ("up", "count_act"), ("down", "count_act")],
    "grad_norm_gate": [("gate", "sum_grad_norm")],
    "grad_norm_up": [("up", "sum_grad_norm")],
    "grad_norm_down": [("down", "sum_grad_norm")],
    "sum_sq": [("gate", "sum_sq")],
    "sum_taylor": [("gate", "sum_taylor")],
    "max_abs": [("gate", "max_abs"), ("up", "max_abs")],
}
GREATEST = frozenset({"max_abs"})  # maxima instead of sums
BITS = "bits_LRf"  # one string per layer, the rows of all tokens concatenated

# For each layer: gate, up, down → name of the weight.
WeightNames = Sequence[Mapping[str, str]]


class Keys:
    """Names of all keys of one namespace.

    `identity` is JSON: the scan's settings, inputs and code. `done` is a bitmap of the committed batches, `pending` the
    set of committed chunks that are not yet added to the sums. `counters` is a hash of tokens, samples and loss_sum,
    `totals` a hash of totals over all sums.
    """

    def __init__(self, namespace: str) -> None:
        """`namespace` is the prefix of all keys."""
        self.namespace = namespace
        names = ("identity", "done", "counters", "totals", "pending")
        self.ledger = [f"{namespace}scan:{name}" for name in names]
        self.identity, self.done, self.counters, self.totals, self.pending = self.ledger

    def chunk(self, name: str) -> str:
        """Staged part of a flush; `name` is `{flush}:{number}`."""
        return f"{self.namespace}scan:staged:{name}"

    def bits(self, layer: int) -> str:
        """Packed activation bits of the reservoir, one layer."""
        return f"{self.namespace}scan:bits:{layer}"

    def rows(self, weight: str) -> str:
        """Prefix of the keys of a weight's rows."""
        return f"{self.namespace}param:{weight}:row:"

    def layer_rows(self, names: Mapping[str, str]) -> list[str]:
        """Prefixes for the three weights of a layer, in the order of PROJECTIONS."""
        return [self.rows(names[projection]) for projection in PROJECTIONS]


def default_namespace(label: str, fingerprint: str) -> str:
    """Namespace of a scan without store.namespace."""
    return f"tiny_onn:{label}:{fingerprint}:"


def columns_of(names: Mapping[str, object] | Sequence[str]) -> list[str]:
    """Names of the (L, F) sums among a scan's tensors, in the order of the columns of chunks.

    Raises:
        KeyError: FIELDS lacks a sum.
    """
    if unknown := set(names) - set(FIELDS) - {BITS}:
        raise KeyError(f"no place in Redis for {', '.join(sorted(unknown))}")
    return [name for name in FIELDS if name in names]


def entries_to_add(columns: Sequence[str]) -> list[str | int]:
    """Script arguments: projection, name, column and maximum flag of every field."""
    return [
        word
        for projection in PROJECTIONS
        for number, column in enumerate(columns)
        for place, field in FIELDS[column]
        if place == projection
        for word in (PROJECTIONS.index(place) + 1, field, number + 1, int(column in GREATEST))
    ]


def entries_to_read(columns: Sequence[str]) -> list[str | int]:
    """Script arguments: projection and name of every column's first field, then of all copies."""
    places = [FIELDS[column][0] for column in columns]
    places += [place for column in columns for place in FIELDS[column][1:]]
    return [word for place, field in places for word in (PROJECTIONS.index(place) + 1, field)]


def copied_columns(columns: Sequence[str]) -> list[int]:
    """For every copy, in the order of `entries_to_read`, the number of its column."""
    return [number for number, column in enumerate(columns) for _copy in FIELDS[column][1:]]


def pack_cache_key(facts: Mapping[str, object], shapes: Mapping[str, Sequence[Any]], weights: WeightNames) -> str:
    """Identity of a scan as JSON: its facts, shapes and number formats of its sums, names of its weights."""
    layers = [{projection: names[projection] for projection in PROJECTIONS} for names in weights]
    sums = {name: [size, str(kind).removeprefix("torch.")] for name, (size, kind) in shapes.items()}
    content = {"layout": LAYOUT_VERSION, "facts": dict(facts), "sums": sums, "weights": layers}
    return json.dumps(content, sort_keys=True)


# As in redis_apply.lua: increments below TINY are added to the `_tiny` field in multiples of UNIT.
TINY, UNIT = 2.0**-24, 2.0**-128
# Relative tolerance between a total and its sums; every increment keeps ten digits.
TOLERANCE = 1e-9


def total_increments(part: ScanSums, columns: Sequence[str]) -> dict[str, float]:
    """Increments of the totals by a part: field → value."""
    totals = {f"counter:{name}": float(count) for name, count in part.counters.items()}
    totals |= {"batches": float(len(part.done)), "marks": sum_marks(part.done)}
    for name, value in _totals_of(part, columns).items():
        tiny = 0 < value < TINY
        totals[f"{name}_tiny" if tiny else name] = value / UNIT if tiny else value
    return totals


def sum_marks(batches: Iterable[int]) -> float:
    """Checksum of a set of batches: the sum of their CRC-32 values; exact up to millions of batches."""
    return float(sum(crc32(str(batch).encode()) for batch in batches))


def _totals_of(part: ScanSums, columns: Sequence[str]) -> dict[str, float]:
    totals = {
        f"{column}:{layer}": float(values_F.double().sum())
        for column in columns
        if column not in GREATEST
        for layer, values_F in enumerate(part.tensors[column])
    }
    for layer, bits_Rf in enumerate(part.tensors.get(BITS, ())):
        totals[f"{BITS}:{layer}"] = float(np.bitwise_count(bits_Rf.numpy()).sum())
    return totals


def find_tampering(sums: ScanSums, columns: Sequence[str], totals: Mapping[str, float]) -> str | None:
    """The first evidence that sums from Redis are not those that were committed; None if they are."""
    for column in columns:
        values_LF = sums.tensors[column].double()
        bad = ~(values_LF.isfinite() & (values_LF >= 0))
        if bad.any():
            layer, neuron = bad.nonzero()[0].tolist()
            return f"{column} of layer {layer}, neuron {neuron}, is no number of 0 or more, or its copy differs"
    found_totals = _totals_of(sums, columns)
    for name, found in found_totals.items():
        wanted = totals.get(name, 0.0) + UNIT * totals.get(f"{name}_tiny", 0.0)
        if not abs(found - wanted) <= TOLERANCE * wanted:
            column, _, layer = name.partition(":")
            return f"{column} of layer {layer} adds up to {found:.10g}, and {wanted:.10g} was added"
    names = {"tokens", "samples", "loss_sum"} if sums.done else set()
    for name in sorted(names | sums.counters.keys()):
        counted, total = sums.counters.get(name), totals.get(f"counter:{name}")
        if counted is None or counted != total or not 0 <= counted < float("inf"):
            return f"counter {name} is {counted}, and its total is {total}"
    known = {"batches", "marks", *(f"counter:{name}" for name in names), *found_totals}
    if unknown := sorted(totals.keys() - known - {f"{name}_tiny" for name in known}):
        return f"there is a total of {unknown[0]}, which no scan counts"
    return None


# Limits per chunk; adding one blocks the server for 20 to 50 ms.
NEURONS_PER_CHUNK, INCREMENTS_PER_CHUNK = 512, 6144
BYTES_PER_CHUNK = 2**20


def pack_chunks(part: ScanSums, columns: Sequence[str], keys: Keys, weights: WeightNames) -> Iterator[bytes]:
    """The chunks of a part: its neurons layer by layer, then its bits.

    A chunk of neurons is `<I4 passed><I4 first neuron><I4 C>`, three zero-terminated key prefixes and rows of C
    doubles; a chunk of bits is `<I4 0><I4 offset><I4 0>`, the zero-terminated key and the bytes. `redis_apply.lua`
    parses both. Raises NumericsError: a sum is not finite.
    """
    if bad := [name for name in columns if not part.tensors[name].isfinite().all()]:
        what = f"sums that are not finite: {', '.join(bad)}"
        do = "model.dtype=float32 or bfloat16"
        raise NumericsError(what, where=f"stage=scan, batches {min(part.done)} to {max(part.done)}", do=do)
    increments = sum(len(FIELDS[name]) for name in columns)
    step = min(NEURONS_PER_CHUNK, max(1, INCREMENTS_PER_CHUNK // increments))
    for layer, names in enumerate(weights):
        rows_FC = np.stack([part.tensors[name][layer].double().numpy() for name in columns], axis=1, dtype="<f8")
        prefixes = b"".join(prefix.encode() + b"\0" for prefix in keys.layer_rows(names))
        for first in range(0, len(rows_FC), step):
            head = struct.pack("<III", 0, first, len(columns))
            yield head + prefixes + rows_FC[first : first + step].tobytes()
    if BITS in part.tensors:
        yield from _pack_bits(part.tensors[BITS], keys)


def unpack_neurons(answer: bytes, columns: int) -> Tensor:
    """Rows of doubles from `redis_read.lua` as a tensor, (neurons, columns)."""
    return torch.from_numpy(np.frombuffer(answer, "<f8").astype(np.float64).reshape(-1, columns))


def _pack_bits(bits_LRf: Tensor, keys: Keys) -> Iterator[bytes]:
    """Chunks of the tokens that this part has read; zeros for the others would overwrite other workers' bits."""
    bytes_each = bits_LRf.shape[2]
    step = max(1, BYTES_PER_CHUNK // max(1, bytes_each))
    for begin, end in _runs(bits_LRf.any(2).any(0)):
        for layer, bits_Rf in enumerate(bits_LRf):
            for first in range(begin, end, step):
                content = bits_Rf[first : min(end, first + step)].contiguous().numpy().tobytes()
                yield struct.pack("<III", 0, first * bytes_each, 0) + keys.bits(layer).encode() + b"\0" + content


def _runs(marks_R: Tensor) -> list[tuple[int, int]]:
    """Begin and end of every run of marked rows."""
    edges = np.diff(marks_R.numpy().astype(np.int8), prepend=0, append=0)
    return list(zip(np.flatnonzero(edges == 1).tolist(), np.flatnonzero(edges == -1).tolist(), strict=True))
