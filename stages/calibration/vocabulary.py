"""Sequences of random tokens: what a model's first layers make of the words that the calibration text left out."""

from collections.abc import Collection

import torch
from transformers import PreTrainedTokenizerBase

from stages.data.encoding import IGNORED
from stages.data.sequences import TokenSequence

OFFSET = 1000  # of Zipf and Mandelbrot's law: the rare count for something, too
SEED = 0


def draw_sequences(
    tokenizer: PreTrainedTokenizerBase, met: Collection[int], tokens: int, length: int
) -> list[TokenSequence]:
    """At most so many tokens in sequences of `length`, none twice; no label counts in a loss.

    A token's weight falls with its id, 1 / (rank + OFFSET): pair merges are numbered in the order they were learnt, the
    frequent first. The draw is always the same for the same `met`.

    Args:
        tokenizer: of the model; its special and added tokens are not drawn.
        met: ids that the text has, which are not drawn either.
        tokens: most to draw; all that are left where these are fewer.
        length: of a sequence, at most.
    """
    known = {*met, *tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
    ids_V = torch.tensor(sorted(set(tokenizer.get_vocab().values())))
    weights_V = 1.0 / (torch.arange(len(ids_V), dtype=torch.float64) + OFFSET)
    weights_V[torch.isin(ids_V, torch.tensor(sorted(known)))] = 0.0
    count = min(tokens, int(weights_V.count_nonzero()))
    if not count:
        return []
    drawn_T = ids_V[weights_V.multinomial(count, generator=torch.Generator().manual_seed(SEED))]
    return [
        TokenSequence(f"vocabulary {number}", ids_T.tolist(), [IGNORED] * len(ids_T))
        for number, ids_T in enumerate(torch.split(drawn_T, length))
    ]
