"""Some of many tokens."""

import pytest
import torch

from stages.calibration.batches import evenly_spaced, pick_tokens, take_tokens


@pytest.mark.parametrize(
    ("count", "wanted", "expected"), [(9, 3, [0, 4, 8]), (3, 7, [0, 1, 2]), (5, 0, [0]), (4, 1, [0]), (1, 1, [0])]
)
def test_tokens_are_spread_from_the_first_to_the_last(count, wanted, expected):
    assert evenly_spaced(count, wanted).tolist() == expected


def test_every_batch_gives_the_same_part():
    picks = pick_tokens([20, 40, 1], 30)
    assert [len(pick_t) for pick_t in picks] == [10, 20, 1]
    assert [len(pick_t) for pick_t in pick_tokens([20, 40, 1], 99)] == [20, 40, 1]
    batches = [torch.arange(count).float()[:, None] for count in (20, 40, 1)]
    taken = take_tokens(batches, picks)
    assert all(torch.equal(part[:, 0].long(), pick_t) for part, pick_t in zip(taken, picks, strict=True))
