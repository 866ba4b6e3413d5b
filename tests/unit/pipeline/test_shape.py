"""From the dials to a shape, and what is wrong with shapes."""

import pytest

from models.shape import Shape
from pipeline.shape import Dials, largest_power_of_two, resolve_shape, shape_faults

POOL = "global_pool"
QWEN = 4864


@pytest.mark.parametrize(
    ("dials", "width", "expected"),
    [
        # Experts that are just the FFN do half of the active width.
        (Dials(16, 64, None, None, 0.5), 1024, Shape(16, 64, 4, 256)),
        (Dials(16, 64, None, None, 0.25), 1024, Shape(16, 64, 2, 128)),
        (Dials(16, 64, None, None, 0.05), 1024, Shape(16, 64, 1, 0)),
        (Dials(16, 304, None, None, 0.5), QWEN, Shape(16, 304, 4, 1216)),
        (Dials(2, 512, None, None, 0.5), 1024, Shape(2, 512, 1, 0)),
        # What they leave over is always on, and as many as fit are chosen.
        (Dials(58, 64, None, None, 0.5), QWEN, Shape(58, 64, 20, 1152)),
        (Dials(58, 64, None, None, 0.75), QWEN, Shape(58, 64, 39, 1152)),
        (Dials(67, 64, None, None, 0.25), QWEN, Shape(67, 64, 10, 576)),
        (Dials(15, 68, None, None, 0.5), 1024, Shape(15, 68, 7, 4)),
        (Dials(40, 64, None, None, 0.5), QWEN, Shape(40, 64, 2, 2304)),
        # They leave over too much.
        (Dials(39, 64, None, None, 0.5), QWEN, Shape(39, 64, 16, 1408)),
        (Dials(16, 64, None, None, 0.5), QWEN, Shape(16, 64, 8, 1920)),
        (Dials(16, 64, None, None, 1.0), QWEN, Shape(16, 64, 16, 3840)),
        (Dials(3, 64, None, None, 0.5), 1024, Shape(3, 64, 1, 448)),
        (Dials(1, 64, None, None, 0.5), 1024, Shape(1, 64, 1, 448)),
        # Of experts that overlap one is chosen, unless always-on neurons leave room for more.
        (Dials(100, 256, None, None, 0.5), 1024, Shape(100, 256, 1, 256)),
        (Dials(100, 256, None, None, 0.25), 1024, Shape(100, 256, 1, 0)),
        (Dials(100, 256, None, None, 0.5), QWEN, Shape(100, 256, 1, 2176)),
        (Dials(17, 64, None, None, 0.5), 1024, Shape(17, 64, 1, 448)),
        (Dials(100, 256, None, 0, 0.5), 1024, Shape(100, 256, 2, 0)),
        # One of the two is given.
        (Dials(16, 64, 3, None, 0.5), 1024, Shape(16, 64, 3, 320)),
        (Dials(58, 64, 39, None, 0.5), QWEN, Shape(58, 64, 39, 0)),
        (Dials(16, 64, None, 0, 0.5), 1024, Shape(16, 64, 8, 0)),
        (Dials(16, 64, None, 500, 0.5), 1024, Shape(16, 64, 1, 500)),
        (Dials(58, 64, None, 1152, 0.5), QWEN, Shape(58, 64, 20, 1152)),
        (Dials(16, 64, None, 1000, 0.5), QWEN, Shape(16, 64, 8, 1000)),
        (Dials(1, 64, None, 0, 0.5), 1024, Shape(1, 64, 1, 0)),
        # As typed, sensible or not.
        (Dials(16, 64, 16, 0, 0.5), 1024, Shape(16, 64, 16, 0)),
        (Dials(16, 64, 17, None, 0.5), 1024, Shape(16, 64, 17, 0)),
        (Dials(16, 64, None, 2000, 0.5), 1024, Shape(16, 64, 1, 2000)),
        # Of a pool all active neurons are routed, but for those asked to be always on.
        (Dials(16, 64, None, None, 0.5, POOL), 1024, Shape(16, 64, 8, 0, POOL)),
        (Dials(100, 256, None, None, 0.5, POOL), QWEN, Shape(100, 256, 8, 0, POOL)),
        (Dials(16, 64, None, 200, 0.5, POOL), 1024, Shape(16, 64, 4, 200, POOL)),
        (Dials(3, 64, 2, None, 0.5, POOL), 1024, Shape(3, 64, 2, 0, POOL)),
    ],
)
def test_open_dials_fill_the_active_share(dials, width, expected):
    assert resolve_shape(dials, width) == expected


@pytest.mark.parametrize(
    ("dials", "width", "expected"),
    [
        (Dials(None, None, None, None, 0.5), QWEN, Shape(58, 64, 20, 1152)),
        (Dials(None, None, None, None, 0.75), QWEN, Shape(58, 64, 39, 1152)),
        (Dials(None, None, None, None, 0.25), QWEN, Shape(67, 64, 10, 576)),
        (Dials(None, None, None, None, 0.05), QWEN, Shape(148, 32, 3, 128)),
        (Dials(None, None, None, None, 0.5), 1024, Shape(12, 64, 4, 256)),
        (Dials(None, None, None, None, 0.5), 40, Shape(8, 4, 3, 8)),
        (Dials(None, None, None, None, 0.5), 2, Shape(2, 1, 1, 0)),
        (Dials(None, 32, None, None, 0.5), QWEN, Shape(116, 32, 40, 1152)),
        (Dials(None, 256, None, None, 0.5), QWEN, Shape(14, 256, 4, 1280)),
        (Dials(None, 9999, None, None, 0.5), QWEN, Shape(1, 9999, 1, 0)),
        (Dials(16, None, None, None, 0.5), QWEN, Shape(16, 232, 5, 1152)),
        (Dials(100, None, None, None, 0.5), QWEN, Shape(100, 40, 39, 864)),
        (Dials(5, None, None, None, 0.05), 1004, Shape(5, 192, 1, 0)),
        (Dials(2000, None, None, None, 0.5), QWEN, Shape(2000, 2, 784, 864)),
        (Dials(9999, None, None, None, 0.5), QWEN, Shape(9999, 1, 1, 2431)),
        (Dials(None, None, None, None, 0.5, POOL), QWEN, Shape(100, 256, 8, 0, POOL)),
        (Dials(None, 64, None, None, 0.5, POOL), QWEN, Shape(100, 64, 32, 0, POOL)),
        (Dials(32, None, None, None, 0.5, POOL), QWEN, Shape(32, 256, 8, 0, POOL)),
    ],
)
def test_open_experts_leave_a_quarter_always_on(dials, width, expected):
    assert resolve_shape(dials, width) == expected


@pytest.mark.parametrize("width", [16, 40, 100, 1000, 1024, QWEN, 6144, 6912, 8192, 18944])
@pytest.mark.parametrize("active", [0.25, 0.5, 0.75])
def test_by_default_every_neuron_has_one_place_and_the_active_share_is_met(width, active):
    shape = resolve_shape(Dials(None, None, None, None, active), width)
    assert shape.experts * shape.n + shape.always_on == width
    assert 1 <= shape.top_k < shape.experts
    assert active * width - shape.n <= shape.active_width <= active * width + 0.5
    assert shape.top_k * shape.n >= shape.active_width / 2.5


@pytest.mark.parametrize("width", [40, 1024, QWEN])
@pytest.mark.parametrize("active", [0.05, 0.5, 0.95])
@pytest.mark.parametrize("topology", ["per_layer", POOL])
def test_whatever_is_left_open_no_more_are_chosen_than_there_are(width, active, topology):
    for experts in (None, 1, 2, 3, 16, 100):
        for n in (None, 1, 8, 64):
            for always_on in (None, 0, 30):
                shape = resolve_shape(Dials(experts, n, None, always_on, active, topology), width)
                assert 1 <= shape.top_k <= shape.experts
                assert topology == POOL or shape.top_k < shape.experts or shape.experts == 1
                assert shape_faults(shape, width) == [] or shape.n > width - shape.always_on


@pytest.mark.parametrize(("bound", "power"), [(0, 0), (1, 1), (2, 2), (3, 2), (31, 16), (32, 32)])
def test_largest_power_of_two(bound, power):
    assert largest_power_of_two(bound) == power


def test_good_shapes_pass():
    assert shape_faults(Shape(16, 64, 4, 256), 1024) == []
    assert shape_faults(Shape(3, 12, 3, 0), 12) == []


def test_neurons_of_a_pool_are_counted_once():
    assert Shape(3, 4, 2, 5).neurons(7) == 7 * (3 * 4 + 5)
    assert Shape(3, 4, 2, 5, POOL).neurons(7) == 3 * 4 + 7 * 5
