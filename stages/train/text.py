"""Training text and held-out text."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from stages.text.config import DataConfig
from stages.text.sequences import TokenBatch, TokenSequence, batch_sequences, load_sequences
from stages.train.config import TrainConfig


@dataclass(frozen=True)
class TrainingText:
    """Training sequences, and held-out batches."""

    sequences: list[TokenSequence]
    heldout: list[TokenBatch]
    pad_id: int

    @property
    def tokens(self) -> int:
        """Training tokens."""
        return sum(len(sequence.ids) for sequence in self.sequences)


def read_text(data: DataConfig, train: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> TrainingText:
    """As much of the calibration split as training wants, and the first sequences of the held-out one."""
    sequences = load_sequences(replace(data, tokens=train.tokens), tokenizer, "calibration")
    heldout = load_sequences(data, tokenizer, "heldout")[: train.heldout_sequences]
    pad_id = tokenizer.pad_token_id or 0
    return TrainingText(sequences, batch_sequences(heldout, train.micro_batch * data.max_length, pad_id), pad_id)


class OrderedSequences(Dataset[TokenSequence]):
    """`length` sequences from a text that may be shorter: one shuffled pass after another, as the seed decides.

    The order is known beforehand, so that a run can be resumed anywhere.
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
        (batch,) = batch_sequences(sequences, sys.maxsize, self.pad_id)
        return {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "labels": batch.labels}
