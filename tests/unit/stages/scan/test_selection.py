import numpy as np
import pytest
import torch

from stages.scan.selection import kth_largest, mark_active_, pack_bits


def test_the_kth_largest_of_each_row():
    magnitude = torch.randn(5, 13, generator=torch.Generator().manual_seed(0)).abs()
    expected = magnitude.sort(dim=1, descending=True).values
    for count in (1, 4, 13):
        assert torch.equal(kth_largest(magnitude, count), expected[:, count - 1 : count])


def test_the_top_share_is_active():
    magnitude = torch.tensor([[3.0, 1.0, 2.0, 0.5, 0.25], [0.0, 0.0, 0.0, 0.0, 7.0]])
    marks = mark_active_(magnitude.clone(), 0.4, None)
    assert marks.tolist() == [[1, 0, 1, 0, 0], [0, 0, 0, 0, 1]]  # zeros are never active


def test_ties_at_the_limit_are_all_active():
    assert mark_active_(torch.tensor([[2.0, 2.0, 2.0, 1.0, 1.0]]), 0.2, None).tolist() == [[1, 1, 1, 0, 0]]


def test_a_threshold_rules_out_the_share():
    assert mark_active_(torch.tensor([[3.0, 1.0, 2.0]]), 0.01, 1.0).tolist() == [[1, 0, 1]]


def test_at_least_one_unit_is_active():
    assert mark_active_(torch.tensor([[3.0, 1.0, 2.0]]), 1e-9, None).sum() == 1


@pytest.mark.parametrize("width", [1, 8, 13, 24])
def test_bits_are_those_of_numpy(width):
    active = (torch.rand(5, width, generator=torch.Generator().manual_seed(width)) > 0.5).float()
    assert np.array_equal(pack_bits(active).numpy(), np.packbits(active.bool().numpy(), axis=1))
