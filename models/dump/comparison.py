"""Two dumps of the same model, tensor by tensor: where they part."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from models.dump.reader import DumpReader
from models.dump.records import STORED, Source, TensorRecord


@dataclass(frozen=True)
class Difference:
    """Of one tensor in two dumps, `b` against `a`."""

    record: TensorRecord  # of the first
    other: TensorRecord
    equal: bool  # to the bit
    relative_l2: float  # ‖b − a‖ ÷ ‖a‖; NaN where shapes differ or a value is not finite
    max_abs: float
    cosine: float

    def beyond(self, tolerance: float) -> bool:
        """Whether it counts: anything that is not equal, or what is above a relative distance."""
        if tolerance == 0:
            return not self.equal
        return not self.equal and not self.relative_l2 <= tolerance


@dataclass(frozen=True)
class Pairs:
    """Records of two dumps that are of the same tensor, in the order of the first; and how many have no partner."""

    pairs: list[tuple[TensorRecord, TensorRecord]]
    only_first: int
    only_second: int


def pair(first: DumpReader, second: DumpReader) -> Pairs:
    """Match stored tensors by process, step, microbatch, call, direction, module and tensor."""
    ours = {_key(record): record for record in first.select(status=STORED)}
    theirs = {_key(record): record for record in second.select(status=STORED)}
    pairs = [(record, theirs[key]) for key, record in ours.items() if key in theirs]
    return Pairs(pairs, len(ours) - len(pairs), len(theirs) - len(pairs))


def compare(first: DumpReader, second: DumpReader, pairs: Pairs) -> Iterator[Difference]:
    """The difference of every pair, in the order in which the first dump captured them."""
    for record, other in pairs.pairs:
        yield _difference(record, other, first.load(record), second.load(other))


def _key(record: TensorRecord) -> tuple[int, bool, Source]:
    return record.rank, record.rounded_from is not None, record.source


def _difference(record: TensorRecord, other: TensorRecord, a: Tensor, b: Tensor) -> Difference:
    if a.shape != b.shape:
        return Difference(record, other, False, math.nan, math.nan, math.nan)
    if a.dtype == b.dtype and torch.equal(_bits(a), _bits(b)):
        return Difference(record, other, True, 0.0, 0.0, 1.0)
    x, y = a.double(), b.double()
    gap, size = float(torch.linalg.vector_norm(y - x)), float(torch.linalg.vector_norm(x))
    scale = size * float(torch.linalg.vector_norm(y))
    relative = gap / size if size else (math.inf if gap else 0.0)
    cosine = float((x * y).sum()) / scale if scale else math.nan
    return Difference(record, other, False, relative, float((y - x).abs().max()), cosine)


def _bits(tensor: Tensor) -> Tensor:
    """As bytes: NaN equals itself, and 0 is not −0."""
    return tensor.contiguous().view(-1).view(torch.uint8)
