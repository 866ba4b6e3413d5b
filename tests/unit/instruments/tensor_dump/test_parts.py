"""Token positions that are kept, from a whole sequence and from its parts."""

import pytest
import torch

from instruments.tensor_dump.config import DumpConfig
from instruments.tensor_dump.parts import Part, keep_tokens

B, T, D = 2, 12, 5


@pytest.fixture
def tensor():
    return torch.randn(B, T, D)


def test_all_of_them(tensor):
    kept, placement = keep_tokens(tensor, Part.whole(tensor, 1), DumpConfig())
    assert kept is tensor
    assert keep_tokens(tensor, Part.whole(tensor, None), DumpConfig(max_tokens=1))[0] is tensor  # a weight
    assert (placement.global_shape, placement.offset, placement.tokens) == ((B, T, D), (0, 0, 0), None)


@pytest.mark.parametrize(
    ("settings", "chosen"),
    [
        ({"max_tokens": 3}, [0, 1, 2]),
        ({"first_token": 4, "every_tokens": 3}, [4, 7, 10]),
        ({"first_token": 1, "every_tokens": 5, "max_tokens": 2}, [1, 6]),
        ({"first_token": 99}, []),
    ],
)
def test_a_subset_of_the_whole_and_of_parts(tensor, settings, chosen):
    config = DumpConfig(**settings)
    kept, placement = keep_tokens(tensor, Part.whole(tensor, 1), config)
    assert torch.equal(kept, tensor[:, chosen])
    assert placement.global_shape == (B, len(chosen), D)
    joined = torch.full((B, len(chosen), D), torch.nan)
    for index, part in enumerate(tensor.chunk(3, dim=1)):
        mine, where = keep_tokens(part, Part.of_axis(part, 1, index, 3, 1), config)
        assert where.global_shape == (B, len(chosen), D)
        joined[:, where.offset[1] : where.offset[1] + mine.shape[1]] = mine
    assert torch.equal(joined, tensor[:, chosen])


def test_parts_made_of_pieces():
    """Gate and up are concatenated, and each process holds a slice of both."""
    part = Part.of_axis(torch.randn(6, D), 0, index=1, parts=2, token_axis=None, pieces=2)
    assert (part.global_shape, part.offset, part.pieces) == ((12, D), (3, 0), (0, 2))
