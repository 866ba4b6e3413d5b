import itertools

import pytest

from stages.plots.scale import Scale, round_range, round_step, spread_apart, tick_label


def test_a_scale_is_a_straight_line_either_way():
    scale = Scale(1.0, 0.0, 10, 110)
    assert [scale(value) for value in (1.0, 0.75, 0.0)] == [10, 35, 110]


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([0.05, 0.3], [0.0, 0.1, 0.2, 0.3]),
        ([-0.1, 0.3], [-0.1, 0.0, 0.1, 0.2, 0.3]),
        ([], [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        ([0.0], [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        ([float("inf"), float("nan"), 2.0], [0.0, 0.5, 1.0, 1.5, 2.0]),
    ],
)
def test_ticks_are_round_and_hold_zero_and_all_values(values, wanted):
    assert round_range(values) == pytest.approx(wanted)


def test_an_axis_can_be_asked_to_reach_further():
    assert round_range([0.3], at_least=1.0)[-1] == 1.0


def test_steps_are_one_two_two_and_a_half_or_five():
    assert [round_step(rough) for rough in (0.09, 0.11, 2.2, 3.0, 7.0)] == pytest.approx([0.1, 0.2, 2.5, 5, 10])


def test_ticks_have_the_decimals_of_their_step():
    assert [tick_label(value, [0.0, 0.25]) for value in (0.0, -0.5)] == ["0.00", "−0.50"]
    assert tick_label(2000.0, [0.0, 1000.0]) == "2,000"


def test_labels_are_pushed_apart_in_their_order():
    moved = spread_apart([50.0, 10.0, 51.0, 52.0], 10, 0, 100)
    assert moved[1] == 10
    places = sorted(moved)
    assert all(later - earlier >= 10 for earlier, later in itertools.pairwise(places))
    assert moved[0] < moved[2] < moved[3]


def test_labels_stay_on_the_sheet():
    assert spread_apart([95.0, 96.0, 97.0], 10, 0, 100) == [80, 90, 100]
    crowded = spread_apart([5.0] * 11, 20, 0, 100)
    assert (min(crowded), max(crowded)) == pytest.approx((0, 100))
    assert spread_apart([], 10, 0, 100) == []
