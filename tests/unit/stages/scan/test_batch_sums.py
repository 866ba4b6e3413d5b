import numpy as np
import pytest
import torch

from stages.scan.batch_sums import pack_bits, sum_tokens, sum_tokens_numpy
from stages.scan.config import ScanConfig

FUNCTIONS = [sum_tokens, sum_tokens_numpy]


def draw(tokens=300, width=53, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logit_std = torch.rand(width, generator=generator).pow(4)
    return [torch.randn(tokens, width, generator=generator) * logit_std for _ in range(2)]


def plain(h, grad, rule):
    """Reference sums, one token at a time."""
    h, grad = h.double(), grad.double()
    active = torch.zeros_like(h)
    for token, values in enumerate(h.abs()):
        limit = values.sort(descending=True).values[rule.active_count(len(values)) - 1]
        active[token] = (values >= limit) & (values > 0)
    sums = [h.abs().sum(0), h.square().sum(0), h.abs().amax(0), active.sum(0), (h * grad).abs().sum(0)]
    return torch.stack(sums), active


@pytest.mark.parametrize("sum_up", FUNCTIONS)
@pytest.mark.parametrize("rule", [ScanConfig(active_share=0.1), ScanConfig(active_share=0.5)])
def test_sums_are_those_of_the_obvious_loop(sum_up, rule):
    h, grad = draw()
    rows = torch.tensor([row for row in range(len(h)) if row % 7])
    (found,), (limits,) = sum_up(h[None], grad[None], rows, rule)
    expected, active = plain(h[rows], grad[rows], rule)
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=0)
    assert torch.equal(found[3], expected[3])
    assert torch.equal((h[rows].abs() >= limits[:, None]).double(), active)


@pytest.mark.parametrize("sum_up", FUNCTIONS)
def test_ties_at_the_limit_are_all_active_and_zeros_never(sum_up):
    h = torch.tensor([[2.0, -2.0, 2.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0, 7.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    (found,), _ = sum_up(h[None], None, torch.arange(3), ScanConfig(active_share=0.4))
    assert found[3].tolist() == [1, 1, 1, 0, 1]
    (one,), _ = sum_up(h[None, :1, 2:], None, torch.arange(1), ScanConfig(active_share=1e-9))
    assert one[3].sum() == 1  # at least one is active


def test_threads_change_nothing():
    h, grad = draw(tokens=700)
    rows, threads = torch.arange(700), torch.get_num_threads()
    found = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(sum_tokens_numpy(h[None], grad[None], rows, ScanConfig(active_share=0.1))[0])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)


@pytest.mark.parametrize("width", [1, 8, 13, 24])
def test_bits_are_those_of_numpy(width):
    active = torch.rand(5, width, generator=torch.Generator().manual_seed(width)) > 0.5
    for rows in (active, active[:0]):
        assert np.array_equal(pack_bits(rows).numpy(), np.packbits(rows.numpy(), axis=1))
