"""Where Redis keeps the sums of a scan: the keys, the fields, and what the texts of numbers can hold.

A neuron's sums are three hashes, one for each projection, `{namespace}param:{weight name}:row:{neuron}`: the neuron's
row of gate_proj and up_proj, its column of down_proj. `sum_act` is the sum of |h| over tokens, `count_act` the tokens
on which the neuron is active, `sum_grad_norm` the sum of gradient norms over samples. Divided by the counters `tokens`
(the first two) and `samples` (the third) of `{namespace}scan:counters` they are averages and the frequency.

HINCRBYFLOAT keeps 17 decimals after the point. An increment below 2^-24 would lose more than 1e-10 of itself, so it
goes to the field with `_tiny` at its end, counted in units of 2^-128; the sum is field + 2^-128·tiny field.

Readers check the sums against the hash `{namespace}scan:totals`: for every sum and layer the total over all neurons,
copies of the counters, the number of batches and of their marks. A commit adds to it in one step with the marks in
`scan:done`.
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
# Sum of the scan → where it stands. The first place counts; the others repeat it for readers of single rows, and are
# compared with it.
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
GREATEST = frozenset({"max_abs"})  # not added up
BITS = "bits_LRf"  # one string for each layer, rows of tokens one after the other

# Layers' weight names: gate, up, down → name.
WeightNames = Sequence[Mapping[str, str]]


class Keys:
    """Names of everything under one namespace.

    `identity` says as JSON what was scanned and by which code. `done` is a bitmap of the batches that are in the sums
    or in chunks that wait to be added, `pending` the set of these chunks. `counters` is a hash of tokens, samples and
    loss_sum, `totals` one of what the sums add up to.
    """

    def __init__(self, namespace: str) -> None:
        """Every key begins with `namespace`."""
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
        """What the keys of a weight's rows begin with."""
        return f"{self.namespace}param:{weight}:row:"

    def layer_rows(self, names: Mapping[str, str]) -> list[str]:
        """The same for the three weights of a layer, in the order of PROJECTIONS."""
        return [self.rows(names[projection]) for projection in PROJECTIONS]


def default_namespace(label: str, fingerprint: str) -> str:
    """Namespace of a scan that names none."""
    return f"tiny_onn:{label}:{fingerprint}:"


def columns_of(names: Mapping[str, object] | Sequence[str]) -> list[str]:
    """The (L, F) sums among the tensors of a scan, in the order of chunks' columns.

    Raises:
        KeyError: one has no place in Redis.
    """
    if unknown := set(names) - set(FIELDS) - {BITS}:
        raise KeyError(f"no place in Redis for {', '.join(sorted(unknown))}")
    return [name for name in FIELDS if name in names]


def entries_to_add(columns: Sequence[str]) -> list[str | int]:
    """Script arguments: for every field its projection, name, column and whether it is a maximum."""
    return [
        word
        for projection in PROJECTIONS
        for number, column in enumerate(columns)
        for place, field in FIELDS[column]
        if place == projection
        for word in (PROJECTIONS.index(place) + 1, field, number + 1, int(column in GREATEST))
    ]


def entries_to_read(columns: Sequence[str]) -> list[str | int]:
    """Script arguments: projection and name of every column's first field, then of the copies of all columns."""
    places = [FIELDS[column][0] for column in columns]
    places += [place for column in columns for place in FIELDS[column][1:]]
    return [word for place, field in places for word in (PROJECTIONS.index(place) + 1, field)]


def copied_columns(columns: Sequence[str]) -> list[int]:
    """For every copy, in the order of `entries_to_read`, the number of the column that it repeats."""
    return [number for number, column in enumerate(columns) for _copy in FIELDS[column][1:]]


def pack_cache_key(facts: Mapping[str, object], shapes: Mapping[str, Sequence[Any]], weights: WeightNames) -> str:
    """Identity of a scan: its facts, the sizes and number formats of its sums, the names of its weights."""
    layers = [{projection: names[projection] for projection in PROJECTIONS} for names in weights]
    sums = {name: [size, str(kind).removeprefix("torch.")] for name, (size, kind) in shapes.items()}
    content = {"layout": LAYOUT_VERSION, "facts": dict(facts), "sums": sums, "weights": layers}
    return json.dumps(content, sort_keys=True)


# As redis_apply.lua: increments below the first go to the field of tiny ones, in units of the second.
TINY, UNIT = 2.0**-24, 2.0**-128
# Between a total and the sums it is of; every increment keeps ten digits.
TOLERANCE = 1e-9


def total_increments(part: ScanSums, columns: Sequence[str]) -> dict[str, float]:
    """What a part adds to the totals, by field."""
    totals = {f"counter:{name}": float(count) for name, count in part.counters.items()}
    totals |= {"batches": float(len(part.done)), "marks": sum_marks(part.done)}
    for name, value in _totals_of(part, columns).items():
        tiny = 0 < value < TINY
        totals[f"{name}_tiny" if tiny else name] = value / UNIT if tiny else value
    return totals


def sum_marks(batches: Iterable[int]) -> float:
    """A number by which one set of batches differs from another; exact up to millions of them."""
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
    """What shows that sums from Redis are not those that were committed; None where they are."""
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


# At most; the server answers nobody else for 20 to 50 ms.
UNITS_PER_CHUNK, INCREMENTS_PER_CHUNK = 512, 6144
BYTES_PER_CHUNK = 2**20


def pack_chunks(part: ScanSums, columns: Sequence[str], keys: Keys, weights: WeightNames) -> Iterator[bytes]:
    """The chunks of a part: its neurons layer by layer, then its bits.

    A chunk of neurons is `<I4 passed><I4 first neuron><I4 C>`, three zero-ended prefixes of keys and rows of C doubles;
    a chunk of bits is `<I4 0><I4 offset><I4 0>`, the zero-ended key and the bytes to put there. `redis_apply.lua` reads
    them.

    Raises:
        NumericsError: a sum is not finite.
    """
    _check_finite(part, columns)
    increments = sum(len(FIELDS[name]) for name in columns)
    step = min(UNITS_PER_CHUNK, max(1, INCREMENTS_PER_CHUNK // increments))
    for layer, names in enumerate(weights):
        rows_FC = np.stack([part.tensors[name][layer].double().numpy() for name in columns], axis=1, dtype="<f8")
        prefixes = b"".join(prefix.encode() + b"\0" for prefix in keys.layer_rows(names))
        for first in range(0, len(rows_FC), step):
            head = struct.pack("<III", 0, first, len(columns))
            yield head + prefixes + rows_FC[first : first + step].tobytes()
    if BITS in part.tensors:
        yield from _pack_bits(part.tensors[BITS], keys)


def unpack_neurons(answer: bytes, columns: int) -> Tensor:
    """Rows of doubles as `redis_read.lua` gives them, (neurons, columns)."""
    return torch.from_numpy(np.frombuffer(answer, "<f8").astype(np.float64).reshape(-1, columns))


def _pack_bits(bits_LRf: Tensor, keys: Keys) -> Iterator[bytes]:
    """Only tokens that this part has read: zeros would erase what others found."""
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


def _check_finite(part: ScanSums, columns: Sequence[str]) -> None:
    bad = [name for name in columns if not part.tensors[name].isfinite().all()]
    if bad:
        raise NumericsError(
            f"sums that are not finite: {', '.join(bad)}",
            where=f"stage=scan, batches {min(part.done)} to {max(part.done)}",
            do="model.dtype=float32 or bfloat16",
        )
