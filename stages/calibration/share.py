"""The batches of a text, shared by workers: sums over them, subsets of their tokens, and the validation split."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from stages.artifacts.job import ALONE, Workers
from stages.calibration.token_memory import Keep, as_it_is


def evenly_spaced(count: int, wanted: int) -> Int[Tensor, "t"]:
    """Indices of `wanted` out of `count`, including the first and the last; at least one, at most all."""
    return torch.linspace(0, count - 1, max(1, min(count, wanted))).round().long()


def split_validation(batches: int, share: float, sources: Sequence[str] | None = None) -> tuple[list[int], list[int]]:
    """Batches to fit on, and evenly spaced validation batches; the same one for both if there is only one.

    `sources` names the source of each batch of text (None: all batches are text of one source); random tokens follow.
    The batches of text are counted source by source: sources that alternate would else have all validation batches
    from one of them. Those of random tokens are split separately, because late layers do not have them: otherwise the
    validation text of late layers would be training text of early ones.
    """
    sources = [""] * batches if sources is None else sources
    text = sorted(range(len(sources)), key=lambda batch: sources[batch])
    validation = sorted(_spaced(text, share)) + _spaced(range(len(text), batches), share)
    fitted = sorted({*range(batches)}.difference(validation))
    return fitted, validation or fitted


def _spaced(batches: Sequence[int], share: float) -> list[int]:
    """A `share` of the batches, at least one, but not all."""
    count = min(max(1, round(share * len(batches))), max(0, len(batches) - 1))
    return [batches[round((index + 0.5) * len(batches) / count - 0.5)] for index in range(count)]


@dataclass(frozen=True, eq=False)
class Share(Sequence[Tensor]):
    """One worker's batches of a text, (T, D) each; all batches if there is one process.

    Worker r of W holds the batches r, r + W, r + 2·W ... `total` adds in the order of all batches, so that its result
    is the same to the last bit for any number of workers.
    """

    parts: Sequence[Tensor]
    sizes: Sequence[int]  # token counts of all batches, other workers' included
    like: Tensor  # (0, D)
    workers: Workers = ALONE
    keep: Keep = as_it_is  # stores tensors that are computed from the batches
    sources: Sequence[str] = field(kw_only=True)  # of each batch of text; the others, random tokens, come last

    @classmethod
    def of(cls, batches: Sequence[Tensor]) -> "Share":
        """Wrap batches that are all in this process; a Share is returned unchanged."""
        if isinstance(batches, Share):
            return batches
        like = batches[0][:0] if batches else torch.empty(0, 0)
        return cls(batches, [len(batch_TD) for batch_TD in batches], like, sources=[""] * len(batches))

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, place: Any) -> Any:  # noqa: ANN401 - as of any sequence
        return self.parts[place]

    @property
    def tokens(self) -> int:
        """Number of tokens of all workers."""
        return sum(self.sizes)

    def split(self, validation_share: float) -> tuple[list[int], list[int]]:
        """Numbers of the batches to fit on, and of the validation batches; see `split_validation`."""
        return split_validation(len(self.sizes), validation_share, self.sources)

    def places(self, batches: Collection[int] | None = None) -> Iterator[tuple[int, int]]:
        """This worker's batches among the numbered ones, or all of its batches: (number, place in this sequence)."""
        numbers = range(len(self.sizes))[self.workers.rank :: self.workers.world]
        return ((number, place) for place, number in enumerate(numbers) if batches is None or number in batches)

    def map(self, compute: Callable[[Tensor], Tensor]) -> "Share":
        """The share of `compute` of every batch."""
        return self.holding([self.keep(compute(batch_TD)) for batch_TD in self])

    def holding(self, parts: Sequence[Tensor]) -> "Share":
        """The same share with other tensors for its batches, row by row of the same tokens."""
        return replace(self, parts=parts)

    def only_text(self) -> "Share":
        """Only the batches of text."""
        text = len(self.sources)
        mine = len(range(text)[self.workers.rank :: self.workers.world])
        return replace(self, parts=self.parts[:mine], sizes=self.sizes[:text])

    def taken(self, share: float) -> "Share":
        """An evenly spaced `share` of the tokens of every batch, at least one token."""
        sizes = [len(evenly_spaced(size, round(size * share))) for size in self.sizes]
        parts = [batch_TD[evenly_spaced(len(batch_TD), round(len(batch_TD) * share))] for batch_TD in self]
        return replace(self, parts=parts, sizes=sizes)

    def total(
        self, shape: tuple[int, ...], measure: Callable[[int], Tensor], batches: Collection[int] | None = None
    ) -> Tensor:
        """Σ of `measure` over all batches, or the numbered ones, fp64; every worker gets it.

        `measure` returns a small tensor of that `shape` for a place in this sequence.
        """
        table = self.like.new_zeros(len(self.sizes), *shape, dtype=torch.float64)
        for number, place in self.places(batches):
            table[number] = measure(place)
        self.workers.sum_(table)
        return table.sum(0)

    def gather(self, at: int = 0) -> list[Tensor]:
        """All batches in order at the worker `at`; an empty list at the others."""
        if self.workers.world == 1:
            return list(self.parts)
        gathered, mine = [], dict(self.places())
        for number, size in enumerate(self.sizes):
            batch_TD = self.like.new_zeros(size, self.like.shape[1])
            if number in mine:
                batch_TD.copy_(self.parts[mine[number]])
            self.workers.reduce_(batch_TD, at=at)
            if self.workers.rank == at:
                gathered.append(self.keep(batch_TD))
        return gathered


def take_rows(batches: Sequence[Tensor], rows_t: Int[Tensor, "t"]) -> Tensor:
    """The rows of the concatenated batches (T, D) in the given order: (t, D)."""
    sorted_t, order_t = rows_t.sort()
    ends = torch.tensor([len(batch_TD) for batch_TD in batches]).cumsum(0)
    until = torch.searchsorted(sorted_t, ends)
    counts = until.diff(prepend=until.new_zeros(1)).tolist()
    sorted_t, order_t = (each_t.to(batches[0].device) for each_t in (sorted_t, order_t))  # copied once for all batches
    taken_tD, start = batches[0].new_empty(len(rows_t), batches[0].shape[1]), 0
    pairs = zip(torch.split(order_t, counts), torch.split(sorted_t, counts), strict=True)
    for batch_TD, (places, rows) in zip(batches, pairs, strict=True):
        taken_tD.index_copy_(0, places, batch_TD.index_select(0, rows - start))  # twice as fast as with brackets
        start += len(batch_TD)
    return taken_tD


def sample_rows(batches: Sequence[Tensor], tokens: int) -> Float[Tensor, "t D"]:
    """The rows of at most `tokens` tokens, evenly spaced over all batches."""
    return take_rows(batches, evenly_spaced(sum(map(len, batches)), tokens))


def take_tokens(inputs: Sequence[Tensor], outputs: Sequence[Tensor], wanted: int) -> tuple[Share, Share]:
    """Inputs and outputs of about `wanted` tokens, evenly spaced over every batch, at least one token per batch."""
    given = Share.of(inputs)
    if wanted >= given.tokens:
        return given, given.holding(outputs)
    share = wanted / given.tokens
    return given.taken(share), given.holding(outputs).taken(share)
