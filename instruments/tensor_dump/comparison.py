"""Two dumps of the same model, tensor by tensor: where they part."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tabulate import tabulate
from torch import Tensor
from tqdm import tqdm

from instruments.errors import ConfigError
from instruments.tensor_dump.reader import DumpReader
from instruments.tensor_dump.records import STORED, Source, TensorRecord


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


COLUMNS = ("module", "tensor", "step", "relative L2", "largest", "cosine")
_WORST = 10


def compare_folders(first: Path, second: Path, tolerance: float) -> tuple[bool, str]:
    """Whether no tensor is farther apart than `tolerance`; and in words, the first that is and the worst ones.

    Raises:
        ConfigError: the dumps have no tensor in common.
    """
    with DumpReader(first) as ours, DumpReader(second) as theirs:
        pairs = pair(ours, theirs)
        if not pairs.pairs:
            raise ConfigError(
                "the two dumps have no tensor in common",
                where=f"{first}, {second}",
                do="dump the same modules and steps of the same model twice",
            )
        bar = tqdm(compare(ours, theirs, pairs), total=len(pairs.pairs), desc="compare", leave=False, disable=None)
        differences = [found for found in bar if found.beyond(tolerance)]
    head = f"{len(pairs.pairs):,} tensors compared, {len(differences):,} differ"
    head += f" by more than {tolerance:g}\n" if tolerance else "\n"
    alone = f"only in {first}: {pairs.only_first:,}; only in {second}: {pairs.only_second:,}\n"
    head += alone * bool(pairs.only_first or pairs.only_second)
    return not differences, head + (_describe(differences) if differences else "")


def _describe(differences: Sequence[Difference]) -> str:
    worst = sorted(differences, key=_badness, reverse=True)[:_WORST]
    return (
        f"\nfirst divergence, in the order of capture\n{_table(differences[:1])}\n"
        f"\nlargest relative distances\n{_table(worst)}\n"
    )


def _badness(difference: Difference) -> float:
    return math.inf if math.isnan(difference.relative_l2) else difference.relative_l2


def _table(differences: Sequence[Difference]) -> str:
    rows = [
        (
            found.record.source.module, found.record.source.tensor, str(found.record.source.step),
            f"{found.relative_l2:.3g}", f"{found.max_abs:.3g}", f"{found.cosine:.9f}",
        )
        for found in differences
    ]  # fmt: skip
    return tabulate(rows, COLUMNS, disable_numparse=True)
