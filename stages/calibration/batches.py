"""Calibration text as batches that can be split into a fitted and a guarding part."""

from transformers import PreTrainedTokenizerBase

from stages.data.batches import TokenBatch, batch_sequences
from stages.data.config import DataConfig
from stages.data.sequences import load_sequences

# The guard part is counted in batches: with fewer than these the split would be too coarse.
LEAST_BATCHES = 16


def calibration_batches(data: DataConfig, tokenizer: PreTrainedTokenizerBase, batch_tokens: int) -> list[TokenBatch]:
    """The calibration split in batches of at most `batch_tokens`, smaller where that would give fewer than 16."""
    sequences = load_sequences(data, tokenizer, "calibration")
    total = sum(len(sequence.ids) for sequence in sequences)
    return batch_sequences(sequences, min(batch_tokens, max(1, total // LEAST_BATCHES)), tokenizer.pad_token_id or 0)
