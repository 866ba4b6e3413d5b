"""Sequences of random tokens: what a model's first layers make of the words that the calibration text left out."""

import torch
from transformers import PreTrainedTokenizerBase

from stages.data.encoding import IGNORED
from stages.data.sequences import TokenSequence

OFFSET = 1000  # of Zipf and Mandelbrot's law: the commonest tokens, which any text has, are not drawn all the time
SEED = 0


def draw_sequences(tokenizer: PreTrainedTokenizerBase, tokens: int, length: int) -> list[TokenSequence]:
    """So many tokens in sequences of `length`, always the same ones; no label counts in a loss.

    A token's probability falls with its id, p ∝ 1 / (rank + OFFSET): pair merges are numbered in the order they were
    learnt, the frequent first. Special and added tokens are left out.
    """
    added = set(tokenizer.added_tokens_decoder) | set(tokenizer.all_special_ids)
    ids_V = torch.tensor(sorted(set(tokenizer.get_vocab().values()) - added))
    weights_V = 1.0 / (torch.arange(len(ids_V), dtype=torch.float64) + OFFSET)
    cumulative_V = weights_V.cumsum(0)
    uniform_T = torch.rand(tokens, generator=torch.Generator().manual_seed(SEED), dtype=torch.float64)
    drawn_T = ids_V[torch.searchsorted(cumulative_V, uniform_T * cumulative_V[-1]).clamp_max(len(ids_V) - 1)]
    return [
        TokenSequence(f"vocabulary {number}", ids_T.tolist(), [IGNORED] * len(ids_T))
        for number, ids_T in enumerate(torch.split(drawn_T, length))
    ]
