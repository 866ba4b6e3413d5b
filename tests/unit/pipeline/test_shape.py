"""From the dials to a shape, and what is wrong with shapes."""

import pytest

from models.shape import Shape
from pipeline.shape import Dials, largest_power_of_two, pool_warning, resolve_shape, saving_warning, shape_errors


@pytest.mark.parametrize(
    ("dials", "width", "expected"),
    [
        (Dials(16, 64, None, None, 0.5), 1024, Shape(16, 64, 4, 256)),
        (Dials(16, 64, None, None, 0.25), 1024, Shape(16, 64, 2, 128)),
        # Of experts that overlap one is chosen, unless always-on neurons leave room for more.
        (Dials(100, 256, None, None, 0.5), 1024, Shape(100, 256, 1, 256)),
        (Dials(100, 256, None, None, 0.25), 1024, Shape(100, 256, 1, 0)),
        (Dials(100, 256, None, None, 0.5), 4864, Shape(100, 256, 1, 2176)),
        (Dials(17, 64, None, None, 0.5), 1024, Shape(17, 64, 1, 448)),
        (Dials(100, 256, None, 0, 0.5), 1024, Shape(100, 256, 2, 0)),
        (Dials(1, 64, None, None, 0.5), 1024, Shape(1, 64, 1, 448)),
        (Dials(16, 64, 3, None, 0.5), 1024, Shape(16, 64, 3, 320)),
        (Dials(16, 64, None, 0, 0.5), 1024, Shape(16, 64, 8, 0)),
        (Dials(16, 64, None, 500, 0.5), 1024, Shape(16, 64, 2, 500)),
        (Dials(16, 64, 16, 0, 0.5), 1024, Shape(16, 64, 16, 0)),
        # Of a pool all active neurons are routed, but for those asked to be always on.
        (Dials(16, 64, None, None, 0.5, "global_pool"), 1024, Shape(16, 64, 8, 0, "global_pool")),
        (Dials(100, 256, None, None, 0.5, "global_pool"), 4864, Shape(100, 256, 8, 0, "global_pool")),
        (Dials(16, 64, None, 200, 0.5, "global_pool"), 1024, Shape(16, 64, 4, 200, "global_pool")),
        (Dials(3, 64, 2, None, 0.5, "global_pool"), 1024, Shape(3, 64, 2, 0, "global_pool")),
    ],
)
def test_open_dials_fill_the_active_share(dials, width, expected):
    assert resolve_shape(dials, width) == expected


@pytest.mark.parametrize(("bound", "power"), [(0, 0), (1, 1), (2, 2), (3, 2), (31, 16), (32, 32)])
def test_largest_power_of_two(bound, power):
    assert largest_power_of_two(bound) == power


def test_good_shapes_pass():
    assert shape_errors(Shape(16, 64, 4, 256), 1024, "pico") == []
    assert shape_errors(Shape(3, 12, 3, 0), 12, "pico") == []


def test_more_neurons_than_can_be_routed():
    (error,) = shape_errors(Shape(3, 256, 1, 28), 128, "pico")
    assert str(error) == (
        "n=256 needs at least 256 units a layer that are not always on; there are 100\n"
        "  where: shape, model=pico with F=128 units a layer, 28 of them always on\n"
        "  do:    n=16, or a model with wider FFNs"
    )


def test_several_faults_at_once():
    few, full = shape_errors(Shape(3, 4, 5, 128), 128, "pico")
    assert str(few) == (
        "top_k=5 is more than experts=3\n  where: shape, model=pico with F=128 units a layer\n  do:    top_k=3"
    )
    assert str(full) == (
        "always_on=128 leaves no unit to route; at most 127 of 128 can be always on\n"
        "  where: shape, model=pico with F=128 units a layer\n"
        "  do:    always_on=32"
    )


def test_a_shape_that_saves_nothing_is_said_so():
    assert saving_warning(Shape(16, 64, 4, 256), 1024) is None
    assert saving_warning(Shape(16, 64, 16, 0), 1024) == (
        "no saving: top_k=16 x n=64 + always_on=0 = 1024 neurons serve each token, the dense FFN has 1024; "
        "lower n= or top_k="
    )


def test_a_pool_no_smaller_than_the_dense_ffns_is_said_so():
    assert pool_warning(Shape(63, 64, 4, 0, "global_pool"), 1024, 4) is None
    assert pool_warning(Shape(100, 256, 4, 0), 1024, 4) is None
    assert pool_warning(Shape(100, 256, 2, 3, "global_pool"), 1024, 4) == (
        "no smaller: the pool's 100 x 256 neurons and 4 x 3 always-on ones are 25,612, the dense FFNs have 4,096; "
        "lower experts= or n="
    )


def test_neurons_of_a_pool_are_counted_once():
    assert Shape(3, 4, 2, 5).neurons(7) == 7 * (3 * 4 + 5)
    assert Shape(3, 4, 2, 5, "global_pool").neurons(7) == 3 * 4 + 7 * 5
