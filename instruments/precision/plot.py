"""Plots of auto_diff and analyze_tensor."""

import math
from pathlib import Path

import torch
from matplotlib.figure import Figure

from instruments.distance import Distance
from instruments.precision.comparison import FORMATS
from instruments.precision.findings import Diff
from instruments.precision.tensor_analysis import FIRST_OCTAVE, TensorAnalysis
from instruments.precision.verdict import Verdict

_COLOURS = {Verdict.OK: "#2b6ca3", Verdict.WARNING: "#d69900", Verdict.SEVERE: "#c62828"}
_NAMED = 8  # findings labelled with their module names


def draw_diff(diff: Diff, path: Path) -> None:
    """Write a PNG: propagated errors above, own errors below; dots coloured by verdict, overflows at the top."""
    figure = Figure(figsize=(11, 7), dpi=110, layout="constrained")
    figure.suptitle(f"FP32 against {diff.precision} ({diff.mode}): {diff.verdict}")
    panels, places = figure.subplots(2, 1, sharex=True), range(len(diff.outputs))
    for panel, name in zip(panels, ("propagated", "own"), strict=True):
        errors = [_error(getattr(output, name)) for output in diff.outputs]
        held = [getattr(output, f"{name}_floor") for output in diff.outputs]
        floors = [floor if floor and floor < math.inf else math.nan for floor in held]
        verdicts = [getattr(output, f"{name}_verdict") for output in diff.outputs]
        known = [value for value in (*errors, *floors) if 0 < value < math.inf] or [diff.limits.output_warning]
        top, bottom = 3 * max(*known, diff.limits.output_severe), min(known) / 3
        limits = [diff.limits.warning_ratio * floor for floor in floors]
        panel.fill_between(places, bottom, limits, color="#e4edf5", linewidth=0, label="below the warning limit")
        panel.plot(places, floors, color="#8fb0cc", linewidth=1, label="FP32 off by one unit in the last place")
        shown = [min(max(error, bottom), top) for error in errors]
        panel.scatter(places, shown, s=10, c=[_COLOURS[verdict] for verdict in verdicts], label=name, zorder=3)
        panel.set_yscale("log")
        panel.set_ylim(bottom, 1.3 * top)
        panel.set_ylabel(f"{name} error (normalised L2)")
        panel.legend(fontsize=8, loc="lower right")
    found = [place for place, output in enumerate(diff.outputs) if output.own_verdict is not Verdict.OK]
    for place in found[:_NAMED]:
        panel.axvline(place, color="#cccccc", linewidth=0.8, zorder=0)
        name = diff.outputs[place].name
        panel.text(place, panel.get_ylim()[1], name, fontsize=7, rotation=90, va="top", ha="right")
    panel.set_xlabel("outputs, in the order of execution")
    figure.savefig(path, format="png", metadata={"Software": None})


def _error(distance: Distance | None) -> float:
    if distance is None:
        return math.nan
    return math.inf if distance.nonfinite else distance.normalised_l2


_FORMAT_COLOURS = ("#2b6ca3", "#d69900", "#c62828", "#70378f")


def draw_tensor(found: TensorAnalysis, path: Path) -> None:
    """Write a PNG: a histogram of the sizes of the values, and the range of each format."""
    figure = Figure(figsize=(6, 3.8), dpi=110, layout="constrained")
    panel = figure.subplots()
    places = [FIRST_OCTAVE + k for k, count in enumerate(found.octaves) if count]
    panel.bar(places, [count for count in found.octaves if count], width=1, align="edge", color="#a9c7e0")
    panel.set_yscale("log")
    for number, loss in enumerate(found.losses):
        limits = torch.finfo(FORMATS[loss.format])
        smallest = limits.smallest_normal * limits.eps
        colour, label = _FORMAT_COLOURS[number % 4], f"{loss.format}: {loss.verdict}"
        for edge, style, name in ((limits.smallest_normal, "-", None), (limits.max, "-", label), (smallest, ":", None)):
            panel.axvline(math.log2(edge), color=colour, linestyle=style, linewidth=1.2, label=name)
    panel.set_xlabel("log2|x|; dotted: the smallest value", fontsize=8)
    panel.set_title(f"{found.name} {'×'.join(map(str, found.shape))}", fontsize=10)
    panel.legend(fontsize=7)

    figure.savefig(path, format="png", metadata={"Software": None})
