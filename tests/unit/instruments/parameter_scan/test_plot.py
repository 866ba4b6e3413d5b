import matplotlib.image
import numpy as np
import pytest

from instruments.parameter_scan.command import Grid, draw_delta_sc

RED, BLUE, GREY = "#67001f", "#053061", "#dddddd"  # both ends of the colour scale, and missing values


def grid_of(values_LM, outside=None, modules=("self_attn.q_proj", "mlp.up_proj")):
    return Grid(tuple(range(len(values_LM))), modules, np.array(values_LM, float), outside or {})


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


def test_what_lies_outside_the_layers_shares_the_scale(tmp_path):
    draw_delta_sc(grid_of([[1.0, 0.0]]), tmp_path / "without.png", title="pico")
    draw_delta_sc(grid_of([[1.0, 0.0]], {"embed_tokens": -1.0, "lm_head": np.nan}), tmp_path / "with.png", title="pico")
    assert shares(tmp_path / "with.png")[BLUE] > 2 * shares(tmp_path / "without.png").get(BLUE, 0.01)


def test_the_same_grid_gives_the_same_bytes(tmp_path):
    for name in ("first.png", "second.png"):
        draw_delta_sc(grid_of([[1.0, -3.0]], {"embed": 0.5}), tmp_path / name, title="pico")
    assert (tmp_path / "first.png").read_bytes() == (tmp_path / "second.png").read_bytes()


@pytest.mark.parametrize(
    "grid",
    [
        grid_of([[np.nan, np.nan]]),
        grid_of([[0.0, 0.0]], {"embed": 0.0}),
        Grid((), (), np.empty((0, 0)), {"lm_head": 1.0}),
        Grid((), (), np.empty((0, 0)), {}),
        grid_of(np.arange(600.0).reshape(30, 20), modules=tuple(f"mlp.experts.{e}.up_proj" for e in range(20))),
    ],
)
def test_odd_grids_are_drawn_without_a_word(tmp_path, grid):
    draw_delta_sc(grid, tmp_path / "out.png", title="pico")
    assert (tmp_path / "out.png").stat().st_size > 1000
