import pytest
import torch

from instruments.gradients import sum_blocks
from instruments.parameter_scan.inputs import (
    embedding_columns,
    head_part,
    lookup_columns,
    token_block_squares,
)

B, T, S, D, V = 2, 7, 5, 6, 11


@pytest.fixture
def operands():
    generator = torch.Generator().manual_seed(0)
    ids = torch.tensor([[3, 1, 3, 3, 10, 1, 0], [5, 5, 5, 5, 5, 5, 5]])
    delta = torch.randn(B, T, D, generator=generator)
    x, grad = torch.randn(B, S, D, generator=generator), torch.randn(B, S, V, generator=generator)
    return ids, delta, x, grad


def explicit(ids, delta, x=None, grad=None):
    weight = torch.zeros(B, V, D, dtype=torch.float64)
    for sample, position in ((sample, position) for sample in range(B) for position in range(T)):
        weight[sample, ids[sample, position]] += delta[sample, position].double()
    if x is not None:
        weight += torch.einsum("bsv,bsd->bvd", grad.double(), x.double())
    return weight.square().sum(1)


@pytest.mark.parametrize("gram", [True, False])
def test_gradients_of_equal_tokens_and_of_a_tied_head_add_up(operands, gram):
    """The output embedding reads the last S positions only."""
    ids, delta, x, grad = operands
    torch.testing.assert_close(lookup_columns(ids, delta).double(), explicit(ids, delta), rtol=1e-5, atol=0)
    found = embedding_columns(ids, delta, head_part(x, grad, ids, gram=gram)).double()
    torch.testing.assert_close(found, explicit(ids, delta, x, grad), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("width", "blocks"), [(4, 3), (11, 1), (64, 1), (1, 11)])
def test_blocks_cover_every_column_once(width, blocks):
    x = torch.randn(B, T, 11, generator=torch.Generator().manual_seed(0))
    squares = token_block_squares(x, width)
    assert squares.shape == (B, T, blocks)
    expected = torch.stack([part.square().sum(-1) for part in x.split(width, dim=-1)], dim=-1)
    torch.testing.assert_close(squares, expected)
    torch.testing.assert_close(sum_blocks(x.square().sum(1), width), expected.sum(1))
    torch.testing.assert_close(token_block_squares(x.half(), width), expected, rtol=1e-2, atol=1e-3)
    assert token_block_squares(x.half(), width).dtype == torch.float32
