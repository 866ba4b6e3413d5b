"""The error of every output in the order of execution, beside what one unit in the last place makes of it."""

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from models.numerics.diff.comparison import Distance
from models.numerics.diff.findings import Diff, OutputDiff
from models.numerics.diff.verdict import SEVERE_L2, WARNING_L2, WARNING_RATIO, Verdict

_COLOURS = {Verdict.OK: "#2b6ca3", Verdict.WARNING: "#d69900", Verdict.SEVERE: "#c62828"}
_NAMED = 8  # findings whose names fit


def draw_diff(diff: Diff, path: Path) -> None:
    """Write a PNG: above what arrives, below what each module adds; dots coloured by verdict, overflows at the top."""
    figure = Figure(figsize=(11, 7), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"FP32 against {diff.precision} ({diff.mode}): {diff.verdict}")
    panels = figure.subplots(2, 1, sharex=True)
    for panel, name in zip(panels, ("propagated", "own"), strict=True):
        errors = [_error(getattr(output, name)) for output in diff.outputs]
        floors = [_floor(getattr(output, f"{name}_floor")) for output in diff.outputs]
        verdicts = [getattr(output, f"{name}_verdict") for output in diff.outputs]
        known = [value for value in (*errors, *floors) if 0 < value < math.inf] or [WARNING_L2]
        top, bottom = 3 * max(*known, SEVERE_L2), min(known) / 3
        places = range(len(diff.outputs))
        limits = [WARNING_RATIO * floor for floor in floors]
        panel.fill_between(places, bottom, limits, color="#e4edf5", linewidth=0, label="as the model itself")
        panel.plot(places, floors, color="#8fb0cc", linewidth=1, label="FP32 off by one unit in the last place")
        shown = [min(max(error, bottom), top) for error in errors]
        panel.scatter(places, shown, s=10, c=[_COLOURS[verdict] for verdict in verdicts], label=name, zorder=3)
        panel.set_yscale("log")
        panel.set_ylim(bottom, 1.3 * top)
        panel.set_ylabel(f"{name} error (normalised L2)")
        panel.legend(fontsize=8, loc="lower right")
    _name_findings(panels[1], diff.outputs)
    panels[1].set_xlabel("outputs, in the order of execution")
    figure.savefig(path, format="png", metadata={"Software": None})


def _error(distance: Distance | None) -> float:
    if distance is None:
        return math.nan
    return math.inf if distance.nonfinite else distance.normalised_l2


def _floor(floor: float | None) -> float:
    return floor if floor is not None and math.isfinite(floor) else math.nan


def _name_findings(panel: Axes, outputs: Sequence[OutputDiff]) -> None:
    found = [place for place, output in enumerate(outputs) if output.own_verdict is not Verdict.OK]
    for place in found[:_NAMED]:
        panel.axvline(place, color="#cccccc", linewidth=0.8, zorder=0)
        panel.text(place, panel.get_ylim()[1], outputs[place].name, fontsize=7, rotation=90, va="top", ha="right")
