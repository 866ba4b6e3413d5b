import matplotlib.image
import numpy as np
import pytest

from instruments.parameter_scan.command import delta_sc, draw_delta_sc, grid_by_layer, locate

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


def test_missing_values_and_sequences_without_gradients_are_ignored():
    activation = np.array([[1, 2, np.nan, 3], [9, 9, 1, 1]], np.float32)
    gradient = np.array([[np.nan, 5, 6, 7], [np.nan] * 4], np.float32)
    found = delta_sc(activation, gradient)
    assert np.isnan(found).tolist() == [True, False, True, False]
    deviation = np.sqrt(2 / 3)
    assert found[[1, 3]] == pytest.approx([0 / deviation + 1 / deviation, 1 / deviation - 1 / deviation])


@pytest.mark.parametrize("value", [0.0, 0.1, 1e30])
def test_equal_values_have_no_score(value):
    flat = np.full((1, 3), value, np.float32)
    assert delta_sc(flat, flat).tolist() == [0, 0, 0]
    assert np.isnan(delta_sc(flat[:0], flat[:0])).all()


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.layers.12.self_attn.q_proj.weight", (12, "model.layers.*.self_attn.q_proj")),
        ("model.layers.3.mlp.experts.7.up_proj.weight", (3, "model.layers.*.mlp.experts.7.up_proj")),
        ("lm_head.weight", (None, "lm_head")),
    ],
)
def test_layer_and_module_of_a_weight(name, place):
    assert locate(name) == place


NAMES = ["embed.weight", "m.0.q.weight", "m.0.up.weight", "m.2.q.weight", "n.0.q.weight"]


def test_a_grid_has_gaps_where_a_layer_lacks_a_module():
    layers, modules, values_LM = grid_by_layer(NAMES, np.arange(1.0, 6.0))
    assert (layers, modules) == ([None, 0, 2], ["embed", "m.*.q", "m.*.up", "n.*.q"])
    none = np.nan
    expected = [[1, none, none, none], [none, 2, 3, 5], [none, 4, none, none]]
    assert np.array_equal(values_LM, expected, equal_nan=True)


def count_pixels(path, colour):
    pixels = (matplotlib.image.imread(path)[:, :, :3] * 255).round().astype(int) @ [65536, 256, 1]
    return (pixels == colour).sum()


def test_high_is_red_low_is_blue_and_gaps_are_grey(tmp_path):
    draw_delta_sc([f"m.{n // 2}.{'qk'[n % 2]}" for n in range(6)], np.array([2, -2, np.nan, 0, 2, 2]),
                  tmp_path / "out.png", title="pico")  # fmt: skip
    red, blue, grey = (count_pixels(tmp_path / "out.png", colour) for colour in (0x67001F, 0x053061, 0xDDDDDD))
    assert red == pytest.approx(3 * blue, rel=0.2)
    assert grey == pytest.approx(blue, rel=0.2)


@pytest.mark.parametrize("values_P", [np.full(5, np.nan), np.zeros(5)])
def test_grids_without_a_range_are_drawn(tmp_path, values_P):
    draw_delta_sc(NAMES, values_P, tmp_path / "out.png", title="pico")
    assert (tmp_path / "out.png").stat().st_size > 1000
