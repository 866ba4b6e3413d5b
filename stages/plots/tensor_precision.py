"""A tensor beside the number formats it might be held in."""

import math
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from models.numerics.formats import FORMATS
from models.numerics.tensor.analysis import FIRST_OCTAVE, TensorAnalysis

_COLOURS = ("#2b6ca3", "#d69900", "#c62828", "#70378f")


def draw_tensor(found: TensorAnalysis, path: Path) -> None:
    """Write a PNG of three panels: sizes beside each format's range, the range of every axis, errors of sums."""
    figure = Figure(figsize=(12, 3.8), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{found.name} {'×'.join(map(str, found.shape))}", fontsize=10)
    sizes, ranges, sums = figure.subplots(1, 3).tolist()
    _draw_sizes(found, sizes)
    _draw_ranges(found, ranges)
    _draw_sums(found, sums)
    figure.savefig(path, format="png", metadata={"Software": None})


def _draw_sizes(found: TensorAnalysis, panel: Axes) -> None:
    places = [FIRST_OCTAVE + k for k, count in enumerate(found.octaves) if count]
    panel.bar(places, [count for count in found.octaves if count], width=1, align="edge", color="#a9c7e0")
    panel.set_yscale("log")
    for number, loss in enumerate(found.losses):
        target = FORMATS[loss.format]
        for edge, style in ((target.smallest_normal, "-"), (target.largest, "-"), (target.smallest, ":")):
            label = f"{loss.format}: {loss.verdict}" if edge == target.largest else None
            panel.axvline(math.log2(edge), color=_COLOURS[number % 4], linestyle=style, linewidth=1.2, label=label)
    panel.set_xlabel("log2|x|; dotted: the smallest value", fontsize=8)
    panel.set_title("sizes beside what each format reaches", fontsize=9)
    panel.legend(fontsize=7)


def _draw_ranges(found: TensorAnalysis, panel: Axes) -> None:
    for place, axis in enumerate(found.ranges):
        if axis.smallest:
            panel.plot([axis.smallest, axis.largest], [place, place], color="#2b6ca3", linewidth=5)
    panel.set_xscale("log")
    panel.set_yticks(range(len(found.ranges)), [f"dim {axis.axis}" for axis in found.ranges])
    panel.set_xlabel("max|x| of the slices, smallest to largest", fontsize=8)
    panel.set_title("ranges by dimension", fontsize=9)


def _draw_sums(found: TensorAnalysis, panel: Axes) -> None:
    axes = [axis.axis for axis in found.ranges]
    formats = [loss.format for loss in found.losses]
    width = 0.8 / max(1, len(formats) + 1)
    for number, name in enumerate([*formats, "fp32"]):
        of = name if name in formats else (formats or [""])[0]
        sums = {loss.axis: loss for loss in found.reductions if loss.format == of}
        errors = [sums[axis].fp32 if name == "fp32" else sums[axis].one_by_one for axis in axes if axis in sums]
        shown = [min(max(error, 1e-9), 10.0) for error in errors]
        places = [place + number * width for place in range(len(shown))]
        panel.bar(places, shown, width=width, color=[*_COLOURS, "#555555"][number % 5], label=name)
    panel.set_yscale("log")
    panel.set_xticks([place + 0.4 for place in range(len(axes))], [f"dim {axis}" for axis in axes])
    panel.set_ylabel("normalised L2", fontsize=8)
    panel.set_title("error of a sum, one by one", fontsize=9)
    panel.legend(fontsize=7)
