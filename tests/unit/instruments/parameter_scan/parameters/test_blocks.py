import pytest
import torch

from instruments.parameter_scan.inputs import sum_blocks, token_block_squares

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
