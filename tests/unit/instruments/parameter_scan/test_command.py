import matplotlib.image
import numpy as np
import pytest

from instruments.parameter_scan.command import Grid, delta_sc, draw_delta_sc, grid_by_layer, locate

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


def test_missing_values_are_ignored():
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
    assert np.isnan(delta_sc(flat[:0], flat[:0])).all()


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.layers.12.self_attn.q_proj.weight", (12, "model.layers.*.self_attn.q_proj")),
        ("transformer.h.0.mlp.c_proj.weight", (0, "transformer.h.*.mlp.c_proj")),
        ("model.layers.3.mlp.experts.7.up_proj.weight", (3, "model.layers.*.mlp.experts.7.up_proj")),
        ("model.embed_tokens.weight", (None, "model.embed_tokens")),
        ("lm_head.weight", (None, "lm_head")),
    ],
)
def test_layer_and_module_of_a_weight(name, place):
    assert locate(name) == place


def test_a_grid_has_gaps_where_a_layer_lacks_a_module():
    names = ["embed.weight", "m.0.q.weight", "m.0.up.weight", "m.2.q.weight"]
    grid = grid_by_layer(names, np.array([9.0, 1.0, 2.0, 3.0]))
    assert (grid.layers, grid.modules) == ((None, 0, 2), ("embed", "m.*.q", "m.*.up"))
    none = np.nan
    assert np.array_equal(grid.values_LM, [[9, none, none], [none, 1, 2], [none, 3, none]], equal_nan=True)


def test_modules_of_encoder_and_decoder_are_told_apart():
    names = [f"{stack}.block.{layer}.{part}.weight" for stack in ("encoder", "decoder") for layer in range(2)
             for part in ("attention.q", f"{stack}_only.q")]  # fmt: skip
    grid = grid_by_layer(names, np.arange(len(names), dtype=float))
    modules = tuple(
        f"{stack}.block.*.{part}.q" for stack in ("encoder", "decoder") for part in ("attention", f"{stack}_only")
    )
    assert (grid.layers, grid.modules) == ((0, 1), modules)
    assert grid.values_LM.tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]


RED, BLUE, GREY = "#67001f", "#053061", "#dddddd"  # both ends of the colour scale, and missing values


def grid_of(values_LM, modules=("self_attn.q_proj", "mlp.up_proj")):
    return Grid(tuple(range(len(values_LM))), modules, np.array(values_LM, float))


def shares(path):
    """Share of the picture's pixels by colour."""
    pixels = (matplotlib.image.imread(path)[:, :, :3] * 255).round().astype(int) @ [65536, 256, 1]
    colours, counts = np.unique(pixels, return_counts=True)
    return {f"#{colour:06x}": count / pixels.size for colour, count in zip(colours, counts, strict=True)}


def test_high_is_red_low_is_blue_and_gaps_are_grey(tmp_path):
    path = tmp_path / "out.png"
    draw_delta_sc(grid_of([[2.0, -2.0], [np.nan, 0.0], [2.0, 2.0]]), path, title="pico")
    found = shares(path)
    assert found[RED] == pytest.approx(3 * found[BLUE], rel=0.2)
    assert found[GREY] == pytest.approx(found[BLUE], rel=0.2)


@pytest.mark.parametrize(
    "grid",
    [
        grid_of([[np.nan, np.nan]]),
        grid_of([[0.0, 0.0]]),
        Grid((None,), ("lm_head",), np.ones((1, 1))),
        grid_of(np.arange(600.0).reshape(30, 20), modules=tuple(f"mlp.experts.{e}.up_proj" for e in range(20))),
    ],
)
def test_unusual_grids_are_drawn(tmp_path, grid):
    draw_delta_sc(grid, tmp_path / "out.png", title="pico")
    assert (tmp_path / "out.png").stat().st_size > 1000
