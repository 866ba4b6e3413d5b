"""MXFP8 and MXFP4 against the tables of the OCP Microscaling specification, version 1.0."""

import itertools
import math

import pytest
import torch

from instruments.tensor_dump.rounding import BLOCK, E2M1, E4M3, SCALE_MIN, round_elements, round_to_blocks


def values_of(exponent_bits, mantissa_bits, bias, codes):
    """Every non-negative value of an element format, by section 5.3: (−1)^S · 2^(E−bias) · (1 + 2^−m·M)."""
    found = []
    for exponent, mantissa in itertools.product(range(2**exponent_bits), range(2**mantissa_bits)):
        fraction = mantissa / 2**mantissa_bits
        found.append(2.0 ** (exponent - bias) * (1 + fraction) if exponent else 2.0 ** (1 - bias) * fraction)
    return found[:codes]


# 127 codes: S.1111.111 is NaN. Table 5 of the specification: FP4 has 0, 0.5, 1, 1.5, 2, 3, 4, 6.
GRIDS = {"E4M3": (E4M3, values_of(4, 3, 7, 127)), "E2M1": (E2M1, values_of(2, 1, 1, 8))}


def nearest(value, grid):
    """The grid's nearest value; ties go to the even code."""
    code = min(range(len(grid)), key=lambda one: (abs(grid[one] - abs(value)), one % 2))
    return math.copysign(grid[code], value)


def test_the_grids_are_those_of_the_specification():
    assert GRIDS["E2M1"][1] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert (GRIDS["E4M3"][1][1], GRIDS["E4M3"][1][8], GRIDS["E4M3"][1][-1]) == (2**-9, 2**-6, 448)


@pytest.mark.parametrize("name", GRIDS)
def test_elements_are_rounded_to_the_nearest_ties_to_even(name):
    element, grid = GRIDS[name]
    middles = [(low + high) / 2 for low, high in itertools.pairwise(grid)]
    beside = [math.nextafter(middle, end) for middle in middles for end in (0, math.inf)]
    drawn = (torch.randn(500, generator=torch.Generator().manual_seed(0)) * grid[-1]).tolist()
    values = [*grid, *middles, *beside, *drawn, 10 * grid[-1]]
    values = torch.tensor([sign * value for value in values for sign in (1, -1)])
    expected = torch.tensor([nearest(value, grid) for value in values.tolist()])
    assert torch.equal(round_elements(values, element), expected)


def test_e4m3_is_what_torch_rounds_to():
    values = torch.randn(4000, generator=torch.Generator().manual_seed(1)) * 100
    ours = round_elements(values.clamp(-448, 448), E4M3)
    assert torch.equal(ours, values.clamp(-448, 448).to(torch.float8_e4m3fn).float())


def reference(block, element, grid):
    """Section 6.3 for one block, in plain Python."""
    largest = max(abs(value) for value in block)
    if largest == 0:
        return [0.0] * len(block)
    shared = min(max(math.floor(math.log2(largest)) - element.greatest, -127), 127)
    return [nearest(value / 2.0**shared, grid) * 2.0**shared for value in block]


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("scale", [1.0, 2.0**-100, 2.0**90, 3e-5])
def test_blocks_are_what_a_loop_over_the_specification_gives(name, scale):
    element, grid = GRIDS[name]
    values = torch.randn(3, 2 * BLOCK + 7, generator=torch.Generator().manual_seed(2)) * scale
    found = round_to_blocks(values, element)
    for row, result in zip(values, found, strict=True):
        expected = [one for block in row.split(BLOCK) for one in reference(block.tolist(), element, grid)]
        assert result.tolist() == expected


def test_the_largest_of_a_block_sets_its_scale():
    values = torch.zeros(1, BLOCK)
    values[0, :3] = torch.tensor([7.0, 1.0, 0.3])  # 2^2: scale 1; 7 saturates to 6
    assert round_to_blocks(values, E2M1)[0, :3].tolist() == [6.0, 1.0, 0.5]
    values[0, 0] = 8.0  # 2^3: scale 2
    assert round_to_blocks(values, E2M1)[0, :3].tolist() == [8.0, 1.0, 0.0]


def test_what_is_rounded_stays_as_it_is():
    values = torch.randn(5, 3 * BLOCK)
    for element in (E4M3, E2M1):
        once = round_to_blocks(values, element)
        assert torch.equal(round_to_blocks(once, element), once)


def test_a_value_that_is_not_finite_takes_its_block_with_it():
    values = torch.ones(1, 2 * BLOCK)
    values[0, 3] = math.inf
    found = round_to_blocks(values, E4M3)
    assert found[0, :BLOCK].isnan().all()
    assert torch.equal(found[0, BLOCK:], values[0, BLOCK:])


def test_zeros_and_the_smallest_numbers():
    assert torch.equal(round_to_blocks(torch.zeros(2, 9), E4M3), torch.zeros(2, 9))
    tiny = torch.full((1, BLOCK), 2.0**-149)  # below the smallest scale times the smallest element
    assert torch.equal(round_to_blocks(tiny, E4M3), torch.zeros(1, BLOCK))
    assert SCALE_MIN == -127
