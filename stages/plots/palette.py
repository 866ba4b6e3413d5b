"""Colours that a reader can tell apart."""

from matplotlib.colors import hsv_to_rgb

Colour = tuple[float, float, float]

GOLDEN = 0.618034  # steps of the golden ratio around the hue circle never crowd
SHADES = ((0.85, 0.85), (0.55, 1.0), (1.0, 0.6))  # saturation, value


def distinct_colours(count: int) -> list[Colour]:
    """`count` colours; neighbours in the list differ in hue, those of near hue in shade."""
    colours = []
    for index in range(count):
        red, green, blue = hsv_to_rgb(((index * GOLDEN) % 1.0, *SHADES[index % len(SHADES)]))
        colours.append((float(red), float(green), float(blue)))
    return colours
