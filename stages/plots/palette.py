"""Colours that a reader can tell apart."""

# Drawn greedily from the sRGB cube: each is the farthest in OKLab from those before it, white, grey and black.
COLOURS = (
    "#1f7ab8", "#ff00ff", "#00c200", "#ff0000", "#3d0085", "#851fff", "#d69900", "#660000",
    "#ad0085", "#cc85c2", "#14c2c2", "#004700", "#0000eb", "#cce000", "#00851f", "#ff1f99",
    "#ad1414", "#70a3ff", "#29f5ad", "#003d5c", "#7047a3", "#00ff00", "#ad6614", "#ffa399",
    "#7a9966", "#ffadff", "#b847d6", "#70005c", "#4766ff", "#ad5c7a", "#adc28f", "#5cebff",
)  # fmt: skip


def distinct_colours(count: int) -> list[str]:
    """`count` colours; the most different come first, and beyond 32 they repeat."""
    return [COLOURS[index % len(COLOURS)] for index in range(count)]
