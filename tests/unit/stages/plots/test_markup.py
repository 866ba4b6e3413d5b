import pytest

from stages.plots.markup import Markup, element, join, shown_number


def test_words_are_escaped_and_markup_is_not():
    assert element("p", "a < b & c", element("b", "d")) == "<p>a &lt; b &amp; c<b>d</b></p>"
    assert join("<", Markup("<br/>")) == "&lt;<br/>"


@pytest.mark.parametrize(
    ("attributes", "wanted"),
    [
        ({"class_": "a", "aria_label": "b"}, '<i class="a" aria-label="b"></i>'),
        ({"title": "\"'<&>"}, '<i title="&quot;\'&lt;&amp;&gt;"></i>'),
        ({"checked": True, "hidden": False, "id": None}, "<i checked></i>"),
        ({"x": 1.0, "y": 2.456, "z": -3}, '<i x="1" y="2.46" z="-3"></i>'),
    ],
)
def test_attributes(attributes, wanted):
    assert element("i", **attributes) == wanted


def test_elements_that_hold_nothing_close_themselves():
    assert element("rect", x=1) == '<rect x="1"/>'
    assert element("rect", element("title", "a")) == "<rect><title>a</title></rect>"


def test_coordinates_are_short():
    assert [shown_number(value) for value in (0.0, 1.5, 1.239, 12.0)] == ["0", "1.5", "1.24", "12"]
