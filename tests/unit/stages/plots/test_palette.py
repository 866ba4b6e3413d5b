from itertools import combinations

from matplotlib.colors import to_rgb

from stages.cluster.picture import COLOURS, distinct_colours


def test_the_first_colours_all_differ_clearly():
    for first, second in combinations(map(to_rgb, COLOURS), 2):
        assert max(abs(a - b) for a, b in zip(first, second, strict=True)) > 0.15


def test_more_colours_than_there_are_repeat():
    assert distinct_colours(3) == list(COLOURS[:3])
    many = distinct_colours(100)
    assert len(many) == 100
    assert many[32:64] == list(COLOURS)
