"""Training text and held-out text."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from stages.text.batches import TokenBatch, TokenSequence, batch_sequences
from stages.text.config import DataConfig
from stages.text.sequences import LoadedText, load_text
from stages.train.config import TrainConfig


@dataclass(frozen=True)
class TrainingText:
    """Training sequences, and held-out batches."""

    train: LoadedText
    heldout: list[TokenBatch]
    pad_id: int


def read_text(data: DataConfig, train: TrainConfig, tokenizer: PreTrainedTokenizerBase, pad_id: int) -> TrainingText:
    """Read up to `train.tokens` of the calibration split, and the first sequences of the held-out split."""
    text = load_text(replace(data, tokens=train.tokens), tokenizer, "calibration")
    heldout = load_text(data, tokenizer, "heldout").sequences[: train.heldout_sequences]
    return TrainingText(text, batch_sequences(heldout, train.micro_batch * data.max_length, pad_id), pad_id)


def order_sequences(sequences: Sequence[TokenSequence], first: int, length: int, seed: int) -> list[TokenSequence]:
    """`length` sequences, starting at number `first`, of an endless order: repeated passes, each shuffled differently.

    The order depends on the seed only, so that a run can be resumed at any step.
    """
    ordered: list[TokenSequence] = []
    for number in range(first // len(sequences), -(-(first + length) // len(sequences))):
        shuffle = torch.Generator().manual_seed(seed + number)
        ordered += [sequences[place] for place in torch.randperm(len(sequences), generator=shuffle).tolist()]
    start = first % len(sequences)
    return ordered[start : start + length]


def collate(sequences: Sequence[TokenSequence], pad_id: int) -> dict[str, Tensor]:
    """`input_ids`, `attention_mask` and `labels` of ``(B, T)``, padded on the right to the longest sequence."""
    (batch,) = batch_sequences(sequences, sys.maxsize, pad_id)
    return {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "labels": batch.labels}
