import pytest
from benchmarks.break_even import Products, break_even

LENGTHS = [64, 128, 256]


def test_it_lies_where_the_ratio_passes_one():
    # The ratio grows as T², so it is 1 at 128·√2.
    assert break_even(LENGTHS, [1 / 8, 1 / 2, 2]) == pytest.approx(128 * 2**0.5)
    assert break_even(LENGTHS, [0.5, 1, 2]) == pytest.approx(128)


def test_the_last_passing_counts():
    assert 128 < break_even([64, 128, 256, 512], [0.9, 1.1, 0.9, 1.1]) <= 512


@pytest.mark.parametrize(("ratios", "end"), [([1.1, 2, 3], 64), ([0.2, 0.3, 0.4], 256)])
def test_outside_the_range_it_is_an_end(ratios, end):
    assert break_even(LENGTHS, ratios) == end


def test_the_code_changes_over_at_the_first_length_without_gram():
    assert Products("some", lambda _: {}, lambda length: length <= 173).code_length() == 174
