"""The charts of the report, read back from their SVG."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from pipeline.report.charts import (
    COLOURS,
    HALF,
    INK,
    LOADS,
    NARROW,
    WIDE,
    draw_bars,
    draw_curves,
    draw_lines,
    draw_loads,
    draw_ridges,
    load_class,
)
from pipeline.report.evaluations import Point
from pipeline.report.words import Method

OURS, MASK = Method("ours & <b>more</b>", "moe", "o"), Method("mask $\\frac$", "mask", "s", before=True)
CURVES = {
    OURS: [Point(0.75, 0.1, 0.1, 0.1), Point(0.5, 0.2, 0.15, 0.25, 3)],
    MASK: [Point(0.5, 0.6, 0.6, 0.6)],
}
WIDTHS = [NARROW, WIDE]


def read(svg, width):
    """The tree, after checks for every chart: well-formed, labelled, of this width, no external references."""
    tree = ElementTree.fromstring(svg)
    assert (tree.tag, tree.get("role"), tree.get("width")) == ("svg", "img", str(width))
    assert tree.get("aria-label") == "title <1>"
    ids = {piece.get("id") for piece in tree.iter()} - {None}
    assert {piece.get("href")[1:] for piece in tree.iter("use")} <= ids
    assert not re.search(r"url\(|https?:|<style|(?<!href=\")#[0-9a-f]{6}", svg)
    assert set(re.findall(r"var\(--([^)]+)\)", svg)) <= set(COLOURS)
    for piece in tree.iter("text"):
        assert float(piece.get("x", 0)) <= width
    return tree


def words(tree):
    return ["".join(piece.itertext()).strip() for piece in tree.iter("text")]


def hints(tree):
    return [piece.text for piece in tree.iter("title")]


@pytest.mark.parametrize("width", WIDTHS)
def test_curves_are_named_and_their_points_say_what_they_are(width):
    drawn = draw_curves("title <1>", "gap", CURVES, width, strays=[Point(0.5, 0.4, 0.4, 0.4)], dense=True)
    tree = read(drawn, width)
    assert {OURS.name, MASK.name, "dense", "gap", "FFN neurons active per token"} <= set(words(tree))
    assert f"{OURS.name}, 50\N{NO-BREAK SPACE}%: +0.2000, +0.1500 to +0.2500 over 3" in hints(tree)
    assert len(hints(tree)) == 3
    assert words(tree).index(MASK.name) < words(tree).index(OURS.name)  # the legend is in the order of the last points
    places = {"".join(piece.itertext()): float(piece.get("x")) for piece in tree.iter("text") if piece.get("x")}
    assert places["100\N{NO-BREAK SPACE}%"] < places["60\N{NO-BREAK SPACE}%"]


def test_no_curve_at_all_is_an_empty_chart():
    assert "dense" in words(read(draw_curves("title <1>", "gap", {}, WIDE, dense=True), WIDE))


def test_long_names_are_cut_to_the_room_there_is():
    long = Method("a router of that name which goes on and on, and further on", "moe", "o")
    assert "a router of that name which…" in words(
        read(draw_curves("title <1>", "gap", {long: CURVES[MASK]}, WIDE), WIDE)
    )
    assert any(at.endswith("…") for at in words(read(draw_bars("title <1>", [(long, 0.1)], NARROW), NARROW)))


@pytest.mark.parametrize("width", WIDTHS)
def test_bars_carry_names_and_values(width):
    tree = read(draw_bars("title <1>", [(OURS, -0.1), (MASK, 0.4)], width), width)
    assert {"−0.1000", "+0.4000", OURS.name, MASK.name} == set(words(tree))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_model_without_a_finite_loss_is_drawn_without_a_bar(value):
    tree = read(draw_bars("title <1>", [(OURS, 0.1), (MASK, value)], WIDE), WIDE)
    assert {OURS.name, MASK.name, "+0.1000"} <= set(words(tree))
    read(draw_curves("title <1>", "gap", {OURS: CURVES[OURS], MASK: [Point(0.5, value, value, value)]}, WIDE), WIDE)


@pytest.mark.parametrize("layers", [1, 4, 61])
def test_every_layer_has_its_point(layers):
    points = [(layer, 0.1, f"layer {layer}: here") for layer in range(layers)]
    tree = read(draw_lines("title <1>", "share", {"": points}, reference=(0.25, "chance")), HALF)
    assert hints(tree) == [f"layer {layer}: here" for layer in range(layers)]
    assert {"chance", "1.00", "layer", "share", "0"} <= set(words(tree))


@pytest.mark.parametrize(("last", "tick"), [(900.0, "200"), (250_000.0, "50k"), (2_000_000.0, "1.6M")])
def test_values_over_tokens(last, tick):
    lines = {"ours": [(last / 2, 0.125, "a"), (last, -0.0625, "b")], "theirs": [(last, 0.5, "c")], "nothing": []}
    tree = read(draw_lines("title <1>", "nats", lines, x_name="tokens seen"), HALF)
    assert {"ours", "theirs", "tokens seen", "nats", "0", tick} <= set(words(tree))
    assert hints(tree) == ["a", "b", "c"]


def test_a_single_line_needs_no_legend():
    assert "ours" not in words(read(draw_lines("title <1>", "nats", {"ours": [(0.0, 0.5, "a")]}), HALF))


@pytest.mark.parametrize("layers", [1, 3, 40])
@pytest.mark.parametrize("spread", [1.0, 0.0])
def test_ridges_stand_on_one_axis(layers, spread):
    scores_LF = np.linspace(-spread, spread, 41, dtype=np.float32)[None].repeat(layers, 0)
    tree = read(draw_ridges("title <1>", "S_p", scores_LF, WIDE), WIDE)
    assert len(hints(tree)) == layers
    if spread:
        assert hints(tree)[0] == "layer 0: median 0, middle half −0.5 to 0.5"
    assert {"0", "layer", "S_p"} <= set(words(tree))


@pytest.mark.parametrize("width", WIDTHS)
def test_loads_are_sorted_and_neighbours_of_one_colour_joined(width):
    tree = read(draw_loads("title <1>", [[1.0, 3.0, 0.0, 1.05], [1.0, 1.0, 1.0, 1.0]], width), width)
    assert set(hints(tree)) == {
        "layer 0: an expert of load 3.00",
        "layer 0: 2 experts of load 1.00 to 1.05",
        "layer 0: an expert of load 0.00",
        "layer 1: 4 experts of load 1.00",
    }
    assert {"busiest expert", "idlest", *LOADS} <= set(words(tree))


@pytest.mark.parametrize(
    ("load", "wanted"),
    [(0.0, "none"), (0.01, "below ¼"), (0.25, "from ¼"), (1.0, "from 0.9"), (1.5, "from 1⅓"), (9.0, "4 and more")],
)
def test_classes_of_loads(load, wanted):
    assert LOADS[load_class(load)] == wanted


def test_the_same_values_give_the_same_text():
    assert draw_bars("a", [(OURS, 0.1)], WIDE) == draw_bars("a", [(OURS, 0.1)], WIDE)


def test_colours_can_be_told_apart_by_the_program():
    """Each colour is replaced by a variable of the style sheet, so no two may be equal."""
    assert len(set(INK.values())) == len(COLOURS)
