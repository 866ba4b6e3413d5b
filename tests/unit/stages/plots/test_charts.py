"""What the charts of the report show, read back from their SVG."""

import itertools
from xml.etree import ElementTree

import pytest

from stages.plots.bars import Bar, draw_bars
from stages.plots.by_layer import LayerChart, draw_by_layer
from stages.plots.chart import FULL, HALF, MIDDLE, NARROW, draw_for, fitted, room_for, thinned
from stages.plots.curves import Axes, Curve, Point, draw_curves
from stages.plots.load_map import draw_load_map, load_class
from stages.plots.markers import MARKERS, draw_marker
from stages.plots.over_tokens import Course, draw_over_tokens
from stages.plots.ridges import Ridge, draw_ridges

AXES = Axes("gap against width", "active", "gap", 1.0, "dense")
CURVES = [
    Curve("ours & more", "moe", "circle", [Point(0.75, 0.1, 0.1, 0.1), Point(0.5, 0.2, 0.15, 0.25, 3)]),
    Curve("mask", "mask before", "square", [Point(0.5, 0.6, 0.6, 0.6)]),
    Curve("nothing yet", "oracle", "diamond", []),
]
WIDTHS = [NARROW, HALF, MIDDLE, FULL]


def read(svg, width):
    """The tree, after checking what holds for every chart: well-formed, named, and everything on the sheet."""
    tree = ElementTree.fromstring(svg)
    assert (tree.tag, tree.get("role"), tree.get("width")) == ("svg", "img", str(width))
    assert tree.get("aria-label")
    height = float(tree.get("height"))
    for piece in tree.iter():
        for key, most in (("x", width), ("cx", width), ("x1", width), ("x2", width), ("y", height), ("cy", height)):
            if piece.get(key) is not None:
                assert -0.01 <= float(piece.get(key)) <= most + 0.01, (piece.tag, piece.attrib)
        if piece.get("points"):
            places = [tuple(map(float, pair.split(","))) for pair in piece.get("points").split()]
            assert all(0 <= x <= width and 0 <= y <= height for x, y in places)
    return tree


def words(tree):
    return [piece.text for piece in tree.iter("text")]


@pytest.mark.parametrize("width", WIDTHS)
def test_curves_are_named_and_their_points_stand_where_they_belong(width):
    tree = read(draw_curves(AXES, CURVES, [Point(0.5, 0.4, 0.4, 0.4)], width), width)
    assert {"ours & more", "mask", "dense", "active", "gap", "50\N{NO-BREAK SPACE}%"} <= set(words(tree))
    assert "nothing yet" not in words(tree)
    dots = [piece for piece in tree.iter("circle") if piece.get("class") == "marker moe" and list(piece)]
    wide, narrow = sorted(dots, key=lambda dot: float(dot.get("cx")))
    assert float(wide.get("cy")) > float(narrow.get("cy"))  # a larger gap is higher up
    assert narrow[0].text == "ours & more, 50\N{NO-BREAK SPACE}%: +0.2000, +0.1500 to +0.2500 over 3"
    assert len([piece for piece in tree.iter("path") if piece.get("class") == "whisker moe"]) == 1
    assert len([piece for piece in tree.iter("circle") if piece.get("class") == "marker other"]) == 1


def test_a_single_width_gives_points_without_lines():
    tree = read(draw_curves(AXES, [CURVES[1]], [], MIDDLE), MIDDLE)
    assert not [piece for piece in tree.iter("polyline") if (piece.get("class") or "").startswith("line")]


def test_no_curve_at_all_is_an_empty_chart():
    assert "dense" in words(read(draw_curves(AXES, [], [], MIDDLE), MIDDLE))


def test_points_far_from_the_start_get_the_whole_width():
    far = Curve("far", "moe", "circle", [Point(0.3, 0.1, 0.1, 0.1), Point(0.25, 0.2, 0.2, 0.2)])
    shown = words(read(draw_curves(AXES, [far], [], MIDDLE), MIDDLE))
    assert "30\N{NO-BREAK SPACE}%" in shown
    assert not {"100\N{NO-BREAK SPACE}%", "dense"} & set(shown)


def test_long_names_are_cut_to_the_room_there_is():
    assert fitted("a router of that name", room_for(["a router of that name"], 1000)) == "a router of that name"
    assert fitted("a router of that name", 72) == "a router…"
    assert fitted("abc", 1) == "…"


def test_names_of_close_ends_do_not_overlap():
    ends = [Curve(f"curve {place}", "moe", "circle", [Point(0.5, 0.1 + place / 1000, 0, 1)]) for place in range(9)]
    tree = read(draw_curves(AXES, ends, [], MIDDLE), MIDDLE)
    heights = sorted(float(piece.get("y")) for piece in tree.iter("text") if piece.text.startswith("curve"))
    assert all(later - earlier >= 12 for earlier, later in itertools.pairwise(heights))


@pytest.mark.parametrize("width", WIDTHS)
def test_bars_are_as_long_as_their_values(width):
    bars = [Bar("a", 0.1, "+0.1", "moe"), Bar("b", 0.4, "+0.4", "mask")]
    tree = read(draw_bars("gaps", bars, width), width)
    short, long = (float(piece.get("width")) for piece in tree.iter("rect"))
    assert long == pytest.approx(4 * short, abs=0.05)
    assert words(tree) == ["a", "+0.1", "b", "+0.4"]


def test_a_bar_below_zero_runs_to_the_left():
    tree = read(draw_bars("gaps", [Bar("a", -0.1, "−0.1", "moe"), Bar("b", 0.2, "+0.2", "mask")], MIDDLE), MIDDLE)
    below, above = tree.iter("rect")
    assert float(below.get("x")) + float(below.get("width")) == pytest.approx(float(above.get("x")), abs=0.02)


@pytest.mark.parametrize("layers", [1, 4, 61])
def test_every_layer_has_its_point(layers):
    chart = LayerChart("error", "share", [0.1 + layer / 100 for layer in range(layers)], (0.25, "chance"), 1.0)
    tree = read(draw_by_layer(chart, HALF), HALF)
    dots = list(tree.iter("circle"))
    assert [dot[0].text for dot in dots][-1] == f"layer {layers - 1}: {0.09 + layers / 100:.4f}"
    assert len(dots) == layers
    assert "chance" in words(tree)
    assert "1.00" in words(tree)


@pytest.mark.parametrize("layers", [1, 3, 40])
def test_ridges_stand_on_one_axis(layers):
    ridges = [Ridge([0.1, 0.6, 0.3], (-0.5, 0.0, 0.5))] * layers
    tree = read(draw_ridges("scores", "S_p", ridges, (-1.5, 2.0), MIDDLE), MIDDLE)
    assert len([piece for piece in tree.iter("path") if piece.get("class") == "ridge"]) == layers
    pieces = [piece.get("class") for piece in tree if piece.get("class") in {"ridge", "median"}]
    assert pieces == ["ridge"] * layers + ["median"] * layers  # or a ridge would hide the median above it
    hint = next(tree.iter("title")).text
    assert hint == "layer 0: median 0, middle half −0.5 to 0.5"
    assert "0" in words(tree)


def test_loads_are_sorted_and_neighbours_of_one_colour_joined():
    tree = read(draw_load_map("load", [[1.0, 3.0, 0.0, 1.05], [1.0, 1.0, 1.0, 1.0]], NARROW), NARROW)
    hints = [piece.text for piece in tree.iter("title")]
    assert hints == [
        "layer 0: an expert of load 3.00",
        "layer 0: 2 experts of load 1.00 to 1.05",
        "layer 0: an expert of load 0.00",
        "layer 1: 4 experts of load 1.00",
    ]


@pytest.mark.parametrize(
    ("load", "wanted"),
    [(0.0, "load-none"), (0.01, "load-0"), (0.25, "load-1"), (1.0, "load-4"), (1.5, "load-6"), (9.0, "load-8")],
)
def test_colours_of_loads(load, wanted):
    assert load_class(load) == wanted


@pytest.mark.parametrize("shape", MARKERS)
def test_markers_are_centred(shape):
    marker = ElementTree.fromstring(draw_marker(shape, "moe", 20, 30, hint="a < b"))
    assert marker[0].text == "a < b"
    assert marker.get("class") == "marker moe"


def test_numbers_are_thinned_to_the_room_there_is():
    assert thinned(4, 300) == [0, 1, 2, 3]
    assert thinned(36, 300) == list(range(0, 36, 4))
    assert thinned(1000, 26) == [0]
    assert thinned(1, 5) == [0]


def test_a_chart_is_drawn_for_every_width():
    assert draw_for((NARROW, FULL), lambda width: draw_marker("circle", "moe", width, 0)).count("<circle") == 2


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("last", "ticks"), [(900.0, "0 200"), (250_000.0, "0 50k"), (2_000_000.0, "0 0.5M")])
def test_values_over_tokens(width, last, ticks):
    courses = [
        Course("ours", "moe", [(0.0, 0.25), (last / 2, 0.125), (last, -0.0625)]),
        Course("theirs", "mask", [(0.0, 0.5), (last, 0.5)]),
        Course("nothing yet", "oracle", []),
    ]
    tree = read(draw_over_tokens("gap", "nats", courses, width), width)
    words = [piece.text for piece in tree.iter("text")]
    assert {"ours", "theirs", "tokens seen", "nats", "0"} <= set(words)
    assert "nothing yet" not in words
    hints = [piece.text for piece in tree.iter("title")]
    assert f"{last:,.0f} tokens: -0.0625" in hints
    if width == FULL:
        return
    if width == HALF:
        assert set(ticks.split()) <= set(words)


def test_one_course_needs_no_legend():
    one = [Course("ours", "moe", [(0.0, 0.5), (100.0, 0.25)])]
    words = [piece.text for piece in read(draw_over_tokens("gap", "nats", one, HALF), HALF).iter("text")]
    assert "ours" not in words
