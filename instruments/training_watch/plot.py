"""Loss, gradient norm and loss scale by step, from the log of the monitor or of a training."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

_CURVES = (("loss", "loss", False), ("gradient_norm", "gradient norm", True), ("loss_scale", "loss scale", True))
_COLOURS = {"warning": "#d69900", "severe": "#c62828"}


def draw_training_steps(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write a PNG or SVG, by the file's ending: a panel for each quantity that the log has, steps with findings marked.

    Args:
        lines: of `read_step_log`, or of the `metrics.jsonl` of a training.
        path: of the picture.
    """
    present = [curve for curve in _CURVES if any(curve[0] in line for line in lines)]
    figure = Figure(figsize=(9, 1 + 2.2 * len(present)), layout="constrained")
    panels = figure.subplots(len(present), 1, sharex=True, squeeze=False)[:, 0]
    for panel, (name, label, logarithmic) in zip(panels, present, strict=True):
        _draw_curve(panel, [(line["step"], float(line[name])) for line in lines if name in line], logarithmic)
        panel.set_ylabel(label)
        _mark_findings(panel, lines)
    panels[-1].set_xlabel("step")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {"Software": None})


def _draw_curve(panel: Axes, points: Sequence[tuple[int, float]], logarithmic: bool) -> None:
    """A line through what is finite; crosses at the upper edge where it is not."""
    steps = [step for step, _value in points]
    values = [value if math.isfinite(value) else math.nan for _step, value in points]
    panel.plot(steps, values, color="#2b6ca3", linewidth=1.2, marker="." if len(points) < 60 else None)
    lost = [step for step, value in points if not math.isfinite(value)]
    if lost:
        edge = panel.get_xaxis_transform()
        panel.scatter(lost, [0.97] * len(lost), transform=edge, marker="x", color="#c62828", label="not finite")
        panel.legend(fontsize=8)
    if logarithmic and any(value > 0 for value in values):
        panel.set_yscale("log")


def _mark_findings(panel: Axes, lines: Sequence[Mapping[str, Any]]) -> None:
    for line in lines:
        severities = {found["severity"] for found in line.get("anomalies", ())}
        severities |= {"warning"} if line.get("warnings") else set()
        for severity, colour in _COLOURS.items():
            if severity in severities:
                panel.axvline(line["step"], color=colour, linewidth=0.8, alpha=0.5, zorder=0)
