"""Sums of a part of the scan as chunks of bytes, each so small that adding it blocks the server for a moment only."""

import struct
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from models.errors import NumericsError
from stages.stores.redis_layout import BITS, Keys, WeightNames, places_of
from stages.stores.sums import ScanSums

# At most; the server answers nobody else for 20 to 50 ms.
UNITS_PER_CHUNK, INCREMENTS_PER_CHUNK = 512, 6144
BYTES_PER_CHUNK = 2**20


def pack_chunks(part: ScanSums, columns: Sequence[str], keys: Keys, weights: WeightNames) -> Iterator[bytes]:
    """The chunks of a part: its units layer by layer, then its bits.

    A chunk of units is `<I4 passed><I4 first unit><I4 C>`, three zero-ended prefixes of keys and rows of C doubles; a
    chunk of bits is `<I4 0><I4 offset><I4 0>`, the zero-ended key and the bytes to put there. `redis_apply.lua` reads
    them.

    Raises:
        NumericsError: a sum is not finite.
    """
    _check_finite(part, columns)
    increments = sum(len(places_of(name)) for name in columns)
    step = min(UNITS_PER_CHUNK, max(1, INCREMENTS_PER_CHUNK // increments))
    for layer, names in enumerate(weights):
        rows_FC = np.stack([part.tensors[name][layer].double().numpy() for name in columns], axis=1, dtype="<f8")
        prefixes = b"".join(prefix.encode() + b"\0" for prefix in keys.layer_rows(names))
        for first in range(0, len(rows_FC), step):
            head = struct.pack("<III", 0, first, len(columns))
            yield head + prefixes + rows_FC[first : first + step].tobytes()
    if BITS in part.tensors:
        yield from _pack_bits(part.tensors[BITS], keys)


def unpack_units(answer: bytes, columns: int) -> Tensor:
    """Rows of doubles as `redis_read.lua` gives them, (units, columns)."""
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
