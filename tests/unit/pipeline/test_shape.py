"""From the dials to a shape; faults of shapes."""

from dataclasses import replace

import pytest
from pico import TWO_WIDTHS, decoder_of

from models.config import MoEShape
from pipeline.check import request_shape
from pipeline.settings import compose
from pipeline.shape import ShapeRequest, dense_layer_errors, describe_shape, resolve_shape, shape_faults

POOL = "global_pool"
QWEN = 4864


def dense(experts, n, active, layers, topology="per_layer"):
    source = decoder_of("qwen2", num_hidden_layers=24, intermediate_size=QWEN)
    return ShapeRequest(experts, n, None, None, active, topology, source=source, dense_layers=layers)


def test_the_active_share_is_that_of_all_layers():
    shape = MoEShape(58, 64, 18, 1152, dense_layers=(23,))
    assert shape.active_share(QWEN, 24) == pytest.approx((23 * 2304 / QWEN + 1) / 24)
    assert MoEShape(58, 64, 20, 1152).active_share(QWEN, 24) == 2432 / QWEN


def test_narrow_layers_stay_dense_and_count_by_their_neurons():
    source = decoder_of("gemma4_text", **TWO_WIDTHS)  # 40, 40, 80 and 80 neurons
    request = request_shape(compose(["experts=null", "n=8", "active=0.5", "dense_layers=[]"])[0], source)
    shape = resolve_shape(request, request.width)
    assert (shape.dense_layers, shape.active_width) == ((0, 1), 20)  # 40 + 40 + 20 + 20 of 240
    assert shape.active_share(80, 4, source.lacking) == request.active == 0.5
    said = "dense       layers 0, 1 keep all neurons (2 are too narrow, with 40): 50% active on average"
    assert describe_shape(request, shape)[0] == said
    (error,) = dense_layer_errors(replace(request, topology=POOL))
    assert error.do == "topology=per_layer"


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (dense(58, 64, 0.5, (7, 24, 30)), "no layer 24, 30: the model has 24"),
        (dense(58, 64, 0.5, (-25,)), "no layer -25: the model has 24"),
        (dense(58, 64, 0.5, tuple(range(12))), "12 of 24 layers dense leave nothing of active=0.5 to the others"),
        (dense(58, 64, 0.5, (0,), POOL), "a pool serves every layer: none stays dense"),
        (dense(58, 64, 0.5, tuple(range(11))), None),
        (dense(58, 64, 0.5, ()), None),
        # Nothing is left for `active` to fill.
        (replace(dense(58, 64, 0.5, tuple(range(12))), top_k=8, always_on=512), None),
        (
            replace(dense(58, 64, 0.5, tuple(range(24))), top_k=8, always_on=512),
            "all 24 layers dense: none is left to carve",
        ),
    ],
)
def test_dense_layers_that_cannot_be(request_, said):
    assert [error.what for error in dense_layer_errors(request_)] == ([said] if said else [])


@pytest.mark.parametrize(
    ("dials", "width", "expected"),
    [
        # Experts cover the FFN exactly: they get half of the active width.
        (ShapeRequest(16, 64, None, None, 0.5), 1024, MoEShape(16, 64, 4, 256)),
        # E·N < F: the other neurons are always on, and top_k is the largest that fits.
        (ShapeRequest(58, 64, None, None, 0.5), QWEN, MoEShape(58, 64, 20, 1152)),
        # With all other neurons always on, fewer than 2 experts would fit; with active=1, all 16 fit.
        (ShapeRequest(39, 64, None, None, 0.5), QWEN, MoEShape(39, 64, 16, 1408)),
        (ShapeRequest(16, 64, None, None, 0.5), QWEN, MoEShape(16, 64, 8, 1920)),
        (ShapeRequest(16, 64, None, None, 1.0), QWEN, MoEShape(16, 64, 16, 3840)),
        # always_on given: experts hold all other neurons, but for less than one expert's.
        (ShapeRequest(None, None, None, 0, 0.5), 14336, MoEShape(224, 64, 112, 0)),
        (ShapeRequest(None, None, None, 1000, 0.5), QWEN, MoEShape(60, 64, 22, 1000)),
        (ShapeRequest(16, None, None, 0, 0.5), QWEN, MoEShape(16, 304, 8, 0)),
        # E·N > F: top_k is 1, unless a given always_on leaves room for more.
        (ShapeRequest(100, 256, None, None, 0.5), 1024, MoEShape(100, 256, 1, 256)),
        (ShapeRequest(100, 256, None, 0, 0.5), 1024, MoEShape(100, 256, 2, 0)),
        # Either top_k or always_on is given.
        (ShapeRequest(16, 64, 3, None, 0.5), 1024, MoEShape(16, 64, 3, 320)),
        (ShapeRequest(16, 64, None, 0, 0.5), 1024, MoEShape(16, 64, 8, 0)),
        (ShapeRequest(16, 64, None, 1000, 0.5), QWEN, MoEShape(16, 64, 8, 1000)),
        # Given dials are kept, valid or not.
        (ShapeRequest(16, 64, 17, None, 0.5), 1024, MoEShape(16, 64, 17, 0)),
        (ShapeRequest(16, 64, None, 2000, 0.5), 1024, MoEShape(16, 64, 1, 2000)),
        # A pool has no always-on neurons unless they are given.
        (ShapeRequest(100, 256, None, None, 0.5, POOL), QWEN, MoEShape(100, 256, 8, 0, POOL)),
        (ShapeRequest(16, 64, None, 200, 0.5, POOL), 1024, MoEShape(16, 64, 4, 200, POOL)),
        # The dense layer counts: carved layers have (0.5·24 − 1) / 23 of 4864 = 2326 active neurons, 1152 always on.
        (dense(58, 64, 0.5, (23,)), QWEN, MoEShape(58, 64, 18, 1152, dense_layers=(23,))),
        # Open experts leave about a quarter always on.
        (ShapeRequest(None, None, None, None, 0.5), QWEN, MoEShape(58, 64, 20, 1152)),
        (ShapeRequest(None, None, None, None, 0.05), QWEN, MoEShape(150, 32, 5, 64)),
        # The shapes of stages/README, "A real model".
        (dense(None, 32, 0.75, (0, 23)), QWEN, MoEShape(80, 32, 38, 2304, dense_layers=(0, 23))),
        (dense(None, 32, 0.5, (0, 23)), QWEN, MoEShape(116, 32, 33, 1152, dense_layers=(0, 23))),
        (dense(None, 64, 0.25, (0, 23)), QWEN, MoEShape(71, 64, 8, 320, dense_layers=(0, 23))),
        (ShapeRequest(None, None, None, None, 0.5), 1024, MoEShape(12, 64, 4, 256)),
        (ShapeRequest(None, None, None, None, 0.5), 2, MoEShape(2, 1, 1, 0)),
        (ShapeRequest(None, 256, None, None, 0.5), QWEN, MoEShape(14, 256, 4, 1280)),
        (ShapeRequest(16, None, None, None, 0.5), QWEN, MoEShape(16, 232, 5, 1152)),
        (ShapeRequest(5, None, None, None, 0.05), 1004, MoEShape(5, 200, 1, 0)),
        (ShapeRequest(None, None, None, None, 0.5, POOL), QWEN, MoEShape(100, 256, 8, 0, POOL)),
    ],
)
def test_open_dials_fill_the_active_share(dials, width, expected):
    assert resolve_shape(dials, width) == expected


@pytest.mark.parametrize("width", [16, 40, 100, 1000, 1024, QWEN, 6144, 6912, 8192, 18944])
@pytest.mark.parametrize("active", [0.25, 0.5, 0.75])
def test_by_default_every_neuron_has_one_place_and_the_active_share_is_met(width, active):
    shape = resolve_shape(ShapeRequest(None, None, None, None, active), width)
    assert shape.experts * shape.n + shape.always_on == width
    assert 1 <= shape.top_k < shape.experts
    assert active * width - shape.n <= shape.active_width <= active * width + 0.5
    assert shape.top_k * shape.n >= shape.active_width / 3.5


@pytest.mark.parametrize("width", [1024, QWEN, 6144, 18944])
@pytest.mark.parametrize("number", [2, 5, 8])
def test_carved_layers_beside_dense_ones_route_enough_too(width, number):
    shape = resolve_shape(dense(None, None, 0.5, tuple(range(number))), width)
    assert shape.experts * shape.n + shape.always_on == width
    assert shape.top_k * shape.n >= shape.active_width / 2.5


def test_with_a_number_of_chosen_experts_alone_no_neuron_has_two_places_or_none():
    for top_k in (4, 16, 24):
        shape = resolve_shape(ShapeRequest(None, None, top_k, None, 0.5), QWEN)
        assert shape.top_k == top_k
        assert QWEN - shape.n < shape.experts * shape.n + shape.always_on <= QWEN


@pytest.mark.parametrize("width", [40, 1024, QWEN])
@pytest.mark.parametrize("active", [0.05, 0.5, 0.95])
@pytest.mark.parametrize("topology", ["per_layer", POOL])
def test_no_more_experts_are_chosen_than_there_are_with_any_dial_left_open(width, active, topology):
    for experts in (None, 1, 2, 3, 16, 100):
        for n in (None, 1, 8, 64):
            for always_on in (None, 0, 30):
                shape = resolve_shape(ShapeRequest(experts, n, None, always_on, active, topology), width)
                assert 1 <= shape.top_k <= shape.experts
                assert topology == POOL or shape.top_k < shape.experts or shape.experts == 1
                assert shape_faults(shape, width) == [] or shape.n > width - shape.always_on


def test_neurons_of_a_pool_are_counted_once():
    assert MoEShape(3, 4, 2, 5).neurons(7) == 7 * (3 * 4 + 5)
    assert MoEShape(3, 4, 2, 5, POOL).neurons(7) == 3 * 4 + 7 * 5
