import pytest
import torch

from instruments.gradients import block_squares, sum_blocks, symmetric_gram
from instruments.parameter_scan.inputs import token_block_squares

B, T, N = 2, 3, 11


@pytest.mark.parametrize(("width", "blocks"), [(4, 3), (11, 1), (64, 1), (1, 11)])
def test_blocks_cover_every_column_once(width, blocks):
    x = torch.randn(B, T, N, generator=torch.Generator().manual_seed(0))
    squares = token_block_squares(x, width)
    assert squares.shape == (B, T, blocks)
    expected = torch.stack([part.square().sum(-1) for part in x.split(width, dim=-1)], dim=-1)
    torch.testing.assert_close(squares, expected)
    torch.testing.assert_close(sum_blocks(x.square().sum(1), width), expected.sum(1))
    torch.testing.assert_close(token_block_squares(x.half(), width), expected, rtol=1e-2, atol=1e-3)
    assert token_block_squares(x.half(), width).dtype == torch.float32


@pytest.mark.parametrize(("inputs", "outputs"), [(70, 35), (35, 70)])
@pytest.mark.parametrize("length", [9, 130, 131])  # one piece, equal halves, unequal halves
@pytest.mark.parametrize("widths", [(16, 24), (64, 16), (7, 64)])  # 7 is too narrow for the product by blocks
def test_blocks_of_a_weight_gradient(inputs, outputs, length, widths):
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(B, length, n, generator=generator, dtype=torch.float64) for n in (inputs, outputs))
    product = grad.mT @ x
    expected = [
        torch.stack([part.square().sum((1, 2)) for part in product.split(width, dim)], 1)
        for width, dim in zip(widths, (2, 1), strict=True)
    ]
    x, grad = x.float(), grad.float()
    for way in ("gram", "direct", "auto"):
        found = block_squares(
            x, grad, widths, product=way, gram=lambda: torch.stack([symmetric_gram(one) for one in x])
        )
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=0)
