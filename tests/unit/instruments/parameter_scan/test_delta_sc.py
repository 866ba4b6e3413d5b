import numpy as np
import pytest

from instruments.parameter_scan.command import delta_sc, grid_by_layer
from instruments.parameter_scan.parameters import locate

S, P = 3, 5


def test_difference_of_standard_scores_by_hand():
    random = np.random.default_rng(0)
    activation, gradient = random.lognormal(size=(2, S, P)).astype(np.float32)
    expected = np.zeros(P)
    for s in range(S):
        for p in range(P):
            z = [(row[s, p] - row[s].mean()) / row[s].std() for row in (activation, gradient)]
            expected[p] += (z[0] - z[1]) / S
    assert delta_sc(activation, gradient) == pytest.approx(expected, abs=1e-5)


def test_the_size_of_a_sequence_does_not_count():
    random = np.random.default_rng(1)
    activation, gradient = random.lognormal(size=(2, S, P)).astype(np.float32)
    scaled = delta_sc(activation * np.float32(1024), gradient * np.array([[2], [1], [0.5]], np.float32))
    assert scaled == pytest.approx(delta_sc(activation, gradient), abs=1e-12)


def test_what_is_not_measured_counts_nowhere():
    activation = np.array([[1, 2, np.nan, 3]], np.float32)
    gradient = np.array([[np.nan, 5, 6, 7]], np.float32)
    found = delta_sc(activation, gradient)
    assert np.isnan(found).tolist() == [True, False, True, False]
    logit_std = np.sqrt(2 / 3)
    assert found[[1, 3]] == pytest.approx([0 / logit_std + 1 / logit_std, 1 / logit_std - 1 / logit_std])


def test_a_sequence_without_gradients_leaves_the_others():
    activation = np.array([[1, 2, 4], [9, 9, 1]], np.float32)
    gradient = np.array([[3, 1, 2], [np.nan] * 3], np.float32)
    assert delta_sc(activation, gradient).tolist() == delta_sc(activation[:1], gradient[:1]).tolist()


@pytest.mark.parametrize("value", [0.0, 0.1, 1e30])
def test_equal_values_have_no_score(value):
    flat = np.full((1, 3), value, np.float32)
    assert delta_sc(flat, flat).tolist() == [0, 0, 0]


def test_nothing_scanned():
    assert np.isnan(delta_sc(np.empty((0, 3), np.float32), np.empty((0, 3), np.float32))).all()


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.layers.12.self_attn.q_proj.weight", (12, "self_attn.q_proj")),
        ("transformer.h.0.mlp.c_proj.weight", (0, "mlp.c_proj")),
        ("model.layers.3.mlp.experts.7.up_proj.weight", (3, "mlp.experts.7.up_proj")),
        ("model.embed_tokens.weight", (None, "embed_tokens")),
        ("lm_head.weight", (None, "lm_head")),
    ],
)
def test_layer_and_module_of_a_weight(name, place):
    assert locate(name) == place


def test_a_grid_has_gaps_where_a_layer_lacks_a_module():
    names = ["embed.weight", "m.0.q.weight", "m.0.up.weight", "m.2.q.weight"]
    grid = grid_by_layer(names, np.array([9.0, 1.0, 2.0, 3.0]))
    assert (grid.layers, grid.modules, grid.outside) == ((0, 2), ("q", "up"), {"embed": 9.0})
    assert np.array_equal(grid.values_LM, [[1, 2], [3, np.nan]], equal_nan=True)


def test_modules_of_encoder_and_decoder_are_told_apart():
    names = [f"{stack}.block.{layer}.{part}.weight" for stack in ("encoder", "decoder") for layer in range(2)
             for part in ("attention.q", f"{stack}_only.q")]  # fmt: skip
    names += ["encoder.embed.weight", "decoder.embed.weight", "lm_head.weight"]
    grid = grid_by_layer(names, np.arange(len(names), dtype=float))
    modules = ("encoder.block.*.attention.q", "encoder_only.q", "decoder.block.*.attention.q", "decoder_only.q")
    assert (grid.layers, grid.modules) == ((0, 1), modules)
    assert grid.values_LM.tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert grid.outside == {"encoder.embed": 8, "decoder.embed": 9, "lm_head": 10}
