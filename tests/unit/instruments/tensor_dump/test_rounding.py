"""Formats against their definitions: the OCP Microscaling tables, the 256 codes of HiFloat8."""

import itertools
import math

import pytest
import torch

from instruments.tensor_dump.config import QUANT_TYPES
from instruments.tensor_dump.rounding import (
    BLOCK,
    E2M1,
    E4M3,
    SCALE_MIN,
    round_elements,
    round_into,
    round_to_blocks,
    round_to_hifloat8,
)  # fmt: skip


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


def test_a_value_that_is_not_finite_takes_its_block_with_it():
    values = torch.ones(1, 2 * BLOCK)
    values[0, 3] = math.inf
    found = round_to_blocks(values, E4M3)
    assert found[0, :BLOCK].isnan().all()
    assert torch.equal(found[0, BLOCK:], values[0, BLOCK:])


def test_zeros_and_the_smallest_numbers():
    for quant_type in QUANT_TYPES:
        assert torch.equal(round_into(torch.zeros(3, 5), quant_type).float(), torch.zeros(3, 5))
    tiny = torch.full((1, BLOCK), 2.0**-149)  # below the smallest scale times the smallest element
    assert torch.equal(round_to_blocks(tiny, E4M3), torch.zeros(1, BLOCK))
    assert SCALE_MIN == -127


# Prefix code of the dot field → bits of the exponent; 0000 is the denormal mode.
_DOT = {"11": 4, "10": 3, "01": 2, "001": 1, "0001": 0}


def decode(code):
    """The value of one of the 128 codes without a sign."""
    bits = f"{code:07b}"
    if bits.startswith("0000"):
        mantissa = int(bits[4:], 2)
        return 2.0 ** (mantissa - 23) if mantissa else 0.0
    prefix = next(prefix for prefix in _DOT if bits.startswith(prefix))
    width, rest = _DOT[prefix], bits[len(prefix) :]
    exponent = 0
    if width:  # sign and magnitude; the magnitude's first bit, 1, is not stored
        magnitude = int("1" + rest[1:width], 2)
        exponent = -magnitude if rest[0] == "1" else magnitude
    mantissa = rest[width:]
    if (exponent, mantissa) == (15, "1"):
        return math.inf
    return 2.0**exponent * (1 + int(mantissa, 2) / 2 ** len(mantissa))


HIF8_GRID = sorted(decode(code) for code in range(128))


def test_every_hifloat8_code_is_kept():
    values = torch.tensor([sign * value for value in HIF8_GRID for sign in (1.0, -1.0)])
    assert torch.equal(round_to_hifloat8(values), values)


def test_hifloat8_rounds_to_nearest_and_ties_away_from_zero():
    steps = [*HIF8_GRID[:-1], 1.5 * 2.0**15]  # the next step, in place of infinity
    for low, high in itertools.pairwise(steps):
        middle = (low + high) / 2
        below, above = math.nextafter(middle, 0), middle
        upper = math.inf if high == steps[-1] else high
        found = round_to_hifloat8(torch.tensor([below, above, -below, -above], dtype=torch.float64).float())
        # In float32, `below` may be rounded up to the middle.
        lower = low if float(torch.tensor(below).float()) < middle else upper
        assert found.tolist() == [lower, upper, -lower, -upper], (low, high)


def test_hifloat8_beyond_its_range():
    found = round_to_hifloat8(torch.tensor([1e30, -3.4e38, math.inf, 2.0**-24, -(2.0**-24), -0.0]))
    assert found.tolist() == [math.inf, -math.inf, math.inf, 0.0, 0.0, 0.0]
    assert not found[3:].signbit().any()
    assert round_to_hifloat8(torch.tensor([math.nan])).isnan().all()


def test_formats_that_torch_has():
    values = torch.randn(7, 70, generator=torch.Generator().manual_seed(0))
    assert torch.equal(round_into(values, "bf16"), values.bfloat16())
    assert torch.equal(round_into(values, "fp16"), values.half())
