"""Histograms of tensors, and the range of every channel."""

from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

BINS = 120
_COLUMNS = 3
_BLUE, _PALE = "#2b6ca3", "#a9c7e0"

Named = tuple[str, Tensor]


def draw_histograms(tensors: Sequence[Named], path: Path) -> None:
    """One panel a tensor: a histogram of its finite values in 120 equal bins, on a logarithmic scale."""
    figure, panels = _panels(len(tensors))
    for panel, (name, values) in zip(panels, tensors, strict=True):
        finite = values[values.isfinite()].float()
        counts, edges = torch.histogram(finite.cpu(), BINS) if len(finite) else (torch.zeros(1), torch.arange(2.0))
        panel.stairs(counts.numpy(), edges.numpy(), fill=True, color=_BLUE)
        panel.set_yscale("log")
        panel.set_title(name, fontsize=8)
        panel.set_xlabel("value", fontsize=8)
    figure.savefig(path, format="png", metadata={"Software": None})


def draw_channels(tensors: Sequence[Named], path: Path) -> None:
    """One panel a tensor: of every channel (its last axis) the range, and the 1st to 99th percentile."""
    figure, panels = _panels(len(tensors))
    for panel, (name, values) in zip(panels, tensors, strict=True):
        low, p1, p99, high = channel_ranges(values.float().flatten(0, -2) if values.ndim > 1 else values.float()[None])
        channels = range(len(low))
        panel.fill_between(channels, low, high, color=_PALE, linewidth=0, step="mid", label="range")
        panel.fill_between(channels, p1, p99, color=_BLUE, linewidth=0, step="mid", label="1 to 99 %")
        panel.set_title(name, fontsize=8)
        panel.set_xlabel("channel", fontsize=8)
        panel.legend(fontsize=7)
    figure.savefig(path, format="png", metadata={"Software": None})


def channel_ranges(values_RC: Float[Tensor, "R C"]) -> Float[Tensor, "4 C"]:
    """Minimum, 1st and 99th percentile, and maximum of every channel, over R rows; NaN where a value is not finite."""
    # One channel at a time: quantile() takes no more than 2^24 values at once.
    columns = [column.quantile(torch.tensor([0.0, 0.01, 0.99, 1.0])) for column in _thinned(values_RC).unbind(1)]
    ranges = torch.stack(columns, dim=1)
    ranges[0], ranges[3] = values_RC.amin(0), values_RC.amax(0)
    return ranges


def _thinned(values_RC: Float[Tensor, "R C"]) -> Float[Tensor, "r C"]:
    """Evenly chosen rows: percentiles of 16 384 of them are good enough to look at."""
    return values_RC[:: max(1, len(values_RC) // 16384)]


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    columns = min(count, _COLUMNS)
    rows = -(-count // columns)
    figure = Figure(figsize=(4.6 * columns, 2.9 * rows), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for panel in panels[count:]:
        panel.set_axis_off()
    return figure, panels[:count]
