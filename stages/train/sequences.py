"""The order in which training reads its sequences, and how they become a batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset

from stages.data.encoding import IGNORED
from stages.data.sequences import TokenSequence


class OrderedSequences(Dataset[TokenSequence]):
    """`length` sequences from a text that may be shorter: one shuffled pass after another, as the seed decides.

    The order is known beforehand, so that a run can be taken up anywhere.
    """

    def __init__(self, sequences: Sequence[TokenSequence], first: int, length: int, seed: int) -> None:
        """From the `first` sequence of that endless order."""
        self._sequences, self._first, self._length, self._seed = sequences, first, length, seed
        self._passes: dict[int, list[int]] = {}

    def __len__(self) -> int:
        """How many there are."""
        return self._length

    def __getitem__(self, index: int) -> TokenSequence:
        """The sequence at a place of the order."""
        if not 0 <= index < self._length:
            raise IndexError(index)
        number, place = divmod(self._first + index, len(self._sequences))
        if number not in self._passes:
            shuffle = torch.Generator().manual_seed(self._seed + number)
            self._passes = {number: torch.randperm(len(self._sequences), generator=shuffle).tolist()}
        return self._sequences[self._passes[number][place]]


@dataclass(frozen=True)
class Collator:
    """Pads to the longest sequence of the batch, on the right."""

    pad_id: int

    def __call__(self, sequences: Sequence[TokenSequence]) -> dict[str, Tensor]:
        """`input_ids`, `attention_mask` and `labels` of ``(B, T)``."""
        longest = max(len(sequence.ids) for sequence in sequences)
        rows = {
            "input_ids": [_filled(sequence.ids, longest, self.pad_id) for sequence in sequences],
            "attention_mask": [_filled([1] * len(sequence.ids), longest, 0) for sequence in sequences],
            "labels": [_filled(sequence.labels, longest, IGNORED) for sequence in sequences],
        }
        return {name: torch.tensor(values) for name, values in rows.items()}


def _filled(values: list[int], length: int, filler: int) -> list[int]:
    return [*values, *[filler] * (length - len(values))]
