"""Shapes of points: who cannot tell the colours apart can tell these apart."""

from stages.plots.markup import Markup, element, join

MARKERS = ("circle", "square", "diamond", "triangle", "pentagon")


def draw_marker(shape: str, kind: str, x: float, y: float, *, size: float = 4, hint: str = "") -> Markup:
    """A point of that shape; `hint` is shown where the pointer rests on it."""
    title = element("title", hint) if hint else ""
    classes = f"marker {kind}"
    match shape:
        case "circle":
            return element("circle", title, cx=x, cy=y, r=size, class_=classes)
        case "square":
            side = 1.8 * size
            return element("rect", title, x=x - side / 2, y=y - side / 2, width=side, height=side, class_=classes)
    return element("polygon", title, points=_corners(shape, x, y, size), class_=classes)


def _corners(shape: str, x: float, y: float, size: float) -> Markup:
    offsets = {
        "diamond": ((0, -1.35), (1.35, 0), (0, 1.35), (-1.35, 0)),
        "triangle": ((0, -1.25), (1.2, 0.9), (-1.2, 0.9)),
        "pentagon": ((0, -1.25), (1.19, -0.39), (0.73, 1.01), (-0.73, 1.01), (-1.19, -0.39)),
    }[shape]
    return join(" ".join(f"{x + size * right:.1f},{y + size * down:.1f}" for right, down in offsets))
