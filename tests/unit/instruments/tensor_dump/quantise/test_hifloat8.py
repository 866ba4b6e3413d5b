"""HiFloat8 against its 256 codes, decoded as arXiv:2409.16626 defines them."""

import itertools
import math

import torch

from instruments.tensor_dump.rounding import round_to_hifloat8

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


GRID = sorted(decode(code) for code in range(128))


def test_the_codes_have_the_precision_that_the_paper_states():
    finite = [value for value in GRID if 0 < value < math.inf]
    assert len(set(GRID)) == 128
    assert (finite[0], finite[-1]) == (2.0**-22, 2.0**15)
    per_exponent = {
        exponent: sum(math.frexp(value)[1] - 1 == exponent for value in finite) for exponent in range(-22, 16)
    }
    expected = {exponent: 8 if abs(exponent) <= 3 else 4 if abs(exponent) <= 7 else 2 for exponent in range(-15, 16)}
    expected |= {15: 1} | dict.fromkeys(range(-22, -15), 1)
    assert per_exponent == expected


def test_every_code_stays_what_it_is():
    values = torch.tensor([sign * value for value in GRID for sign in (1.0, -1.0)])
    assert torch.equal(round_to_hifloat8(values), values)


def test_values_go_to_the_nearest_code_and_ties_away_from_zero():
    steps = [*GRID[:-1], 1.5 * 2.0**15]  # the next step, in place of infinity
    for low, high in itertools.pairwise(steps):
        middle = (low + high) / 2
        below, above = math.nextafter(middle, 0), middle
        upper = math.inf if high == steps[-1] else high
        found = round_to_hifloat8(torch.tensor([below, above, -below, -above], dtype=torch.float64).float())
        # In float32, `below` may be rounded up to the middle.
        lower = low if float(torch.tensor(below).float()) < middle else upper
        assert found.tolist() == [lower, upper, -lower, -upper], (low, high)


def test_what_has_no_code_near():
    found = round_to_hifloat8(torch.tensor([1e30, -3.4e38, math.inf, 2.0**-24, -(2.0**-24), -0.0]))
    assert found.tolist() == [math.inf, -math.inf, math.inf, 0.0, 0.0, 0.0]
    assert not found[3:].signbit().any()
    assert round_to_hifloat8(torch.tensor([math.nan])).isnan().all()
