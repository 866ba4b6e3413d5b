"""Range, mean and deviation."""

import math

import numpy as np
import pytest
import torch

from instruments.tensor_dump.index import Statistics
from instruments.tensor_dump.writer import exact_moments, measure, read_moments

T, D = 4211, 37  # more values than are read at a time


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shift", [0.0, 3.0, 200.0])
def test_they_are_those_of_numpy(dtype, shift):
    tensor = (torch.randn(T, D, generator=torch.Generator().manual_seed(0)) + shift).to(dtype)
    found, values = measure(tensor), tensor.double().numpy()
    mean, std = values.mean(), values.std()
    assert (found.minimum, found.maximum) == pytest.approx((values.min(), values.max()), rel=1e-7)
    assert found.mean == pytest.approx(mean, abs=1e-5 * (abs(mean) + std))
    assert found.std == pytest.approx(std, rel=1e-3)
    assert (found.nonfinite, found.all_zero) == (0, False)


def test_values_that_are_not_finite_are_counted_and_left_out():
    tensor = torch.arange(12.0).view(3, 4)
    tensor[0, 0], tensor[1, 2], tensor[2, 3] = math.nan, math.inf, -math.inf
    kept = np.delete(np.arange(12.0), [0, 6, 11])
    found = measure(tensor)
    assert (found.minimum, found.maximum, found.nonfinite) == (kept.min(), kept.max(), 3)
    assert (found.mean, found.std) == pytest.approx((kept.mean(), kept.std()))


def test_the_exact_way_counts_a_single_nan_among_more_values_than_float32_counts():
    moments = exact_moments(torch.tensor([1.0, math.nan, 2.0])).float()  # as a GPU keeps them
    assert read_moments(moments, 2**27 + 1).nonfinite == 1


def test_extremes():
    assert measure(torch.full((5,), math.nan)) == Statistics(None, None, None, None, 5)
    assert measure(torch.empty(0, 4)) == Statistics(None, None, None, None, 0)
    large = torch.tensor([1e30, -1e30, 3e30])  # their squares overflow
    assert measure(large).std == pytest.approx(large.double().numpy().std(), rel=1e-6)
    assert [measure(torch.tensor([0.0, one])).all_zero for one in (0.0, 1e-40, math.nan)] == [True, False, False]
    assert measure(torch.arange(7, dtype=torch.uint8)).maximum == 6


def test_the_order_of_the_axes_does_not_matter():
    tensor = torch.randn(5, 300, 7, generator=torch.Generator().manual_seed(3))
    assert measure(tensor.permute(2, 0, 1)) == measure(tensor)
    assert measure(tensor[:, ::3]).maximum == float(tensor[:, ::3].max())
    assert measure(tensor.expand(4, 5, 300, 7)).mean == pytest.approx(float(tensor.mean()), abs=1e-6)
    assert measure(torch.tensor(3.0)).std == 0
