"""Pictures that a stage drew, embedded in the page."""

from base64 import b64encode
from pathlib import Path

from pipeline.report.chain import Published
from pipeline.report.sections import figure
from stages.plots.markup import Markup, element

LARGEST_PICTURE = 8 << 20  # bytes; a larger one would make the page unwieldy


def draw_pictures(published: Published) -> list[Markup]:
    """The stage's PNG files that are there and not too large."""
    paths = [published.folder / name for name in sorted(published.manifest.files) if name.endswith(".png")]
    return [_draw_picture(path) for path in paths if path.is_file() and path.stat().st_size <= LARGEST_PICTURE]


def _draw_picture(path: Path) -> Markup:
    data = b64encode(path.read_bytes()).decode()
    name = path.stem.replace("_", " ")
    layer = path.stem.rpartition("_")[2]
    is_map = path.stem.startswith("neuron_map") and layer.isdecimal()
    title = f"Map of layer {int(layer)}" if is_map else name.capitalize()
    words = f"{title}: neurons by expert, score and frequency" if is_map else title
    picture = element("img", src=f"data:image/png;base64,{data}", alt=words)
    return figure(title, element("div", picture, class_="scroll picture", tabindex="0"), kind="full")
