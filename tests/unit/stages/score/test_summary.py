import pytest
import torch

from stages.score.stage import rank_correlation


def test_rank_correlation_sees_order_only():
    first_LF = torch.tensor([[1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]])
    second_LF = torch.tensor([[1.0, 10.0, 100.0, 1e6], [4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 4.0, 3.0]])
    assert rank_correlation(first_LF, second_LF) == pytest.approx([1.0, -1.0, 0.8])


def test_no_correlation_with_a_measure_without_spread():
    assert rank_correlation(torch.tensor([[1.0, 2.0, 3.0]]), torch.zeros(1, 3)) == [None]
