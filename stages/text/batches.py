"""Sequences to padded batches."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Int64
from torch import Tensor

from stages.text.sequences import IGNORED, TokenSequence


@dataclass(frozen=True)
class TokenBatch:
    """B sequences, padded on the right to the longest of them."""

    input_ids: Int64[Tensor, "B T"]
    attention_mask: Int64[Tensor, "B T"]  # 1 = token, 0 = padding
    labels: Int64[Tensor, "B T"]  # not shifted; -100 where the token does not count in the loss
    names: list[str]
    domains: list[str] = field(default_factory=list)  # of every sequence; only the scan asks for them
    is_text: bool = True  # False: drawn at random
    layers: int | None = None  # it passes, from the first on; None: all

    @property
    def tokens(self) -> int:
        """Tokens, padding left out."""
        return int(self.attention_mask.sum())


def batch_sequences(sequences: Sequence[TokenSequence], batch_tokens: int, pad_id: int) -> list[TokenBatch]:
    """Batch sequences in their order, B·T <= batch_tokens, padding included.

    A sequence longer than `batch_tokens` is a batch of its own.
    """
    groups = group_lengths([len(sequence.ids) for sequence in sequences], batch_tokens)
    return [_pad(sequences[group.start : group.stop], pad_id) for group in groups]


def split_batch(batch: TokenBatch, batch_tokens: int) -> list[TokenBatch]:
    """The same sequences in batches of B·T <= batch_tokens, of one sequence at least."""
    rows = max(1, batch_tokens // batch.input_ids.shape[1])
    parts = (slice(start, start + rows) for start in range(0, len(batch.names), rows))
    return [
        replace(
            batch,
            input_ids=batch.input_ids[part],
            attention_mask=batch.attention_mask[part],
            labels=batch.labels[part],
            names=batch.names[part],
            domains=batch.domains[part],
        )
        for part in parts
    ]


def group_lengths(lengths: Sequence[int], batch_tokens: int) -> list[range]:
    """Neighbours that share a batch: number times the longest <= `batch_tokens`, or one alone."""
    groups: list[range] = []
    start = longest = 0
    for number, length in enumerate(lengths):
        longest = max(longest, length)
        if number > start and (number - start + 1) * longest > batch_tokens:
            groups.append(range(start, number))
            start, longest = number, length
    return [*groups, range(start, len(lengths))] if lengths else groups


def _pad(group: Sequence[TokenSequence], pad_id: int) -> TokenBatch:
    shape = len(group), max(len(sequence.ids) for sequence in group)
    input_ids, attention_mask, labels = torch.full(shape, pad_id), torch.zeros(shape).long(), torch.full(shape, IGNORED)
    for row, sequence in enumerate(group):
        length = len(sequence.ids)
        input_ids[row, :length] = torch.tensor(sequence.ids)
        attention_mask[row, :length] = 1
        labels[row, :length] = torch.tensor(sequence.labels)
    return TokenBatch(
        input_ids,
        attention_mask,
        labels,
        [sequence.name for sequence in group],
        [sequence.domain for sequence in group],
    )
