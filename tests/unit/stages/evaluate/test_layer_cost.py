"""The calibration text on which the cost of each layer's carve is measured."""

import pytest

from stages.evaluate.stage import spread_sequences
from stages.text.batches import TokenSequence, batch_sequences


def test_short_sequences_of_a_mixture_make_up_the_tokens():
    """Counted by the longest sequence, there would be 141 tokens."""
    lengths = [3 + number * number * 5 % 41 for number in range(36)]
    sequences = [TokenSequence(str(number), [1] * length, [1] * length) for number, length in enumerate(lengths)]
    seen = spread_sequences(batch_sequences(sequences, 90, 0), 300)
    assert sum(one.tokens for one in seen) == pytest.approx(300, rel=0.05)
    assert all(one.input_ids.shape == (1, one.tokens) for one in seen)
    numbers = [int(one.names[0]) for one in seen]
    assert numbers == sorted(set(numbers))
    assert (numbers[0], numbers[-1]) == (0, len(lengths) - 1)


def test_at_least_one_sequence_and_at_most_all():
    sequences = [TokenSequence(str(length), [1] * length, [1] * length) for length in (4, 6, 9)]
    batches = batch_sequences(sequences, 12, 0)
    assert [one.tokens for one in spread_sequences(batches, 1)] == [4]
    assert [one.tokens for one in spread_sequences(batches, 99)] == [4, 6, 9]
