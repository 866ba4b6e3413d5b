"""Evenly spaced subsets of tokens."""

import pytest
import torch

from stages.calibration.share import evenly_spaced, take_tokens


@pytest.mark.parametrize(
    ("count", "wanted", "expected"), [(9, 3, [0, 4, 8]), (3, 7, [0, 1, 2]), (5, 0, [0]), (4, 1, [0]), (1, 1, [0])]
)
def test_tokens_are_spread_from_the_first_to_the_last(count, wanted, expected):
    assert evenly_spaced(count, wanted).tolist() == expected


def test_every_batch_gives_the_same_part():
    batches = [torch.arange(count).float()[:, None] for count in (20, 40, 1)]
    inputs, outputs = take_tokens(batches, [-batch_T1 for batch_T1 in batches], 30)
    assert [len(part_t1) for part_t1 in inputs] == [10, 20, 1]
    assert all(torch.equal(y_t1, -x_t1) for x_t1, y_t1 in zip(inputs, outputs, strict=True))
    assert torch.equal(inputs[1][:, 0].long(), evenly_spaced(40, 20))
    assert [len(part_t1) for part_t1 in take_tokens(batches, batches, 99)[0]] == [20, 40, 1]
