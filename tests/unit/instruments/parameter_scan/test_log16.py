import numpy as np
import pytest

from instruments.parameter_scan.file_format import ELEMENTS_AT_ONCE, LAST, NOT_MEASURED, decode_log16, encode_log16

FP32_ROUNDING = 2.0**-24


def there_and_back(values):
    scale, codes = encode_log16(values)
    return decode_log16(scale, codes), scale, codes


def error_bound(scale):
    """Largest relative error of each column, from the specification."""
    return np.expm1(scale[1] / 2)


def check(values):
    """Check every guarantee of the encoding."""
    found, scale, codes = there_and_back(values)
    assert found.dtype == np.float32
    assert np.array_equal(np.isnan(found), np.isnan(values))
    assert np.array_equal(found == 0, values == 0)
    known = values > 0
    error = np.zeros(values.shape)
    error[known] = np.abs(found[known].astype(np.float64) / values[known] - 1)
    assert (error <= error_bound(scale) + FP32_ROUNDING + 1e-12).all()
    assert ((codes[known] >= 1) & (codes[known] <= LAST)).all()


@pytest.mark.parametrize("seed", range(12))
def test_any_range_stays_within_the_stated_error(seed):
    """Ranges within 1e-30 to 1e30, with zeros and NaN, 0 to 89 rows and 1 to 8 columns."""
    random = np.random.default_rng(seed)
    rows, columns = random.integers(0, 90), random.integers(1, 9)
    ends = np.sort(random.uniform(-30, 30, (2, columns)), axis=0)
    values = (10 ** random.uniform(*ends, (rows, columns))).astype(np.float32)
    values[random.random(values.shape) < random.choice([0, 0.2, 1], p=[0.5, 0.4, 0.1])] = 0
    values[random.random(values.shape) < random.choice([0, 0.2, 1], p=[0.5, 0.4, 0.1])] = np.nan
    check(values)


@pytest.mark.parametrize("value", [1e-45, 1.1754944e-38, 1e-30, 0.1, 1 / 3, 1.0, 424704.0, 3.4028235e38])
def test_a_column_of_one_value_is_exact(value):
    """Beside a column of zeros and gaps alone."""
    columns = np.array([[value, value, np.nan, 0], [0, np.nan, np.nan, 0]], np.float32).T
    found, scale, codes = there_and_back(columns)
    assert np.array_equal(found, columns, equal_nan=True)
    assert error_bound(scale).tolist() == [0, 0]
    assert codes[:, 1].tolist() == [0, NOT_MEASURED, NOT_MEASURED, 0]


def test_codes_are_rounded_and_not_cut_off():
    """0.75 of a step is rounded up, 0.25 and 0.4 are rounded down, and the smallest value does not become 0."""
    step = np.log(100.0) / (LAST - 1)
    values = np.exp(np.array([[0], [10.75], [10.25], [0.4], [LAST - 1]]) * step).astype(np.float32)
    values[0], values[-1] = 1, 100
    _found, _scale, codes = there_and_back(values)
    assert (codes.ravel() - 1).tolist() == [0, 11, 10, 0, LAST - 1]


def test_more_rows_than_are_encoded_at_once():
    values = np.random.default_rng(0).lognormal(size=(ELEMENTS_AT_ONCE // 3 + 11, 4)).astype(np.float32)
    check(values)
    whole = encode_log16(values)
    assert np.array_equal(decode_log16(whole[0], whole[1][-5:]), decode_log16(*whole)[-5:])
