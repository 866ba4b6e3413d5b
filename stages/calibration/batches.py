"""Calibration text, and random tokens beside it, as batches that can be split into a fitted and a guarding part."""

from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from stages.calibration.config import VocabularyConfig
from stages.calibration.vocabulary import draw_sequences
from stages.data.batches import TokenBatch, batch_sequences
from stages.data.config import DataConfig
from stages.data.sequences import load_sequences

# The guard part is counted in batches: with fewer than these the split would be too coarse.
LEAST_BATCHES = 16


def calibration_batches(
    data: DataConfig, vocabulary: VocabularyConfig, tokenizer: PreTrainedTokenizerBase, batch_tokens: int
) -> list[TokenBatch]:
    """The calibration split, then words that it has not, if any are to be drawn, and never more of them than of it.

    Batches hold at most `batch_tokens`, fewer where that would give less than 16 of the text.
    """
    sequences = load_sequences(data, tokenizer, "calibration")
    total = sum(len(sequence.ids) for sequence in sequences)
    size = min(batch_tokens, max(1, total // LEAST_BATCHES))
    pad_id = tokenizer.pad_token_id or 0
    batches = batch_sequences(sequences, size, pad_id)
    if not vocabulary.tokens:
        return batches
    met = {id_ for sequence in sequences for id_ in sequence.ids}
    drawn = draw_sequences(tokenizer, met, min(vocabulary.tokens, total), data.max_length)
    marked = (replace(batch, layers=vocabulary.layers, is_text=False) for batch in batch_sequences(drawn, size, pad_id))
    return [*batches, *marked]


def text_only(batches: Sequence[TokenBatch]) -> list[TokenBatch]:
    """Without those drawn from the vocabulary."""
    return [batch for batch in batches if batch.is_text]
