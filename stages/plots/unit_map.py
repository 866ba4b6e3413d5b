"""One picture of a layer's units: which expert holds each, how it scores, how often it fires."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from torch import Tensor

from stages.plots.palette import Colour, distinct_colours

ALWAYS_ON, DROPPED = -1, -2
MOST_NAMED = 32  # more experts than this are coloured but not listed


@dataclass(frozen=True)
class UnitMap:
    """What the picture shows, unit by unit."""

    coordinates_U2: Float[Tensor, "U 2"]
    home_U: Int[Tensor, "U"]  # an expert, ALWAYS_ON or DROPPED
    s_p_U: Float[Tensor, "U"]
    frequency_U: Float[Tensor, "U"]
    experts: int


def draw_unit_map(units: UnitMap, path: Path, *, title: str) -> None:
    """Write a PNG of three panels; the same input and libraries give the same bytes."""
    figure = Figure(figsize=(19, 6.8), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=16)
    by_expert, by_score, by_frequency = figure.subplots(1, 3)
    by_expert.set_title("Expert")
    _draw_experts(by_expert, units)
    by_score.set_title("S_p")
    _draw_measure(by_score, units, units.s_p_U, Normalize(*_middle(units.s_p_U)), "S_p")
    by_frequency.set_title("Frequency")
    low, high = _middle(units.frequency_U[units.frequency_U > 0])
    _draw_measure(
        by_frequency, units, units.frequency_U.clamp_min(low / 2), LogNorm(low, high),
        "share of tokens where the unit is among the most active",
    )  # fmt: skip
    for panel in (by_expert, by_score, by_frequency):
        panel.set(xticks=[], yticks=[])
        panel.title.set_fontsize(14)
    figure.savefig(path, metadata={"Software": None})


def _middle(values: Tensor) -> tuple[float, float]:
    """Bounds of the colour scale: the extreme 2 % at either end share the end's colour."""
    if not len(values):
        return 0.01, 1.0
    low, high = np.quantile(values.numpy(), (0.02, 0.98)).tolist()
    return (low, high) if high > low else (low, low + 1.0)


def _draw_measure(panel: Axes, units: UnitMap, values_U: Tensor, scale: Normalize, label: str) -> None:
    """Colour by a measure; the highest are drawn last, on top."""
    order_U = values_U.argsort(stable=True)
    x_U, y_U = units.coordinates_U2[order_U].T.numpy()
    dots = panel.scatter(
        x_U, y_U, c=values_U[order_U].numpy(), s=_dot_size(units), cmap="viridis", norm=scale, linewidths=0
    )
    panel.figure.colorbar(dots, ax=panel, label=label, extend="both", shrink=0.85)


def _draw_experts(panel: Axes, units: UnitMap) -> None:
    """Colour by expert, number each group in its midst, and list the experts where they are few."""
    listed = units.experts <= MOST_NAMED
    entries: list[tuple[int, str, str | Colour]] = [(DROPPED, "dropped", "#dddddd"), (ALWAYS_ON, "always on", "#555555")]
    entries += [(e, f"expert {e}", colour) for e, colour in enumerate(distinct_colours(units.experts))]
    handles = []
    for home, name, colour in entries:
        own_U = units.home_U == home
        if not own_U.any():
            continue
        x_U, y_U = units.coordinates_U2[own_U].T.numpy()
        panel.scatter(x_U, y_U, color=colour, s=_dot_size(units), linewidths=0)
        if listed or home < 0:
            handles.append(Line2D([], [], marker="o", linestyle="", color=colour, label=f"{name} ({len(x_U)})"))
        if listed and home >= 0:
            outline = [withStroke(linewidth=3, foreground="white")]
            panel.annotate(
                str(home), (float(np.median(x_U)), float(np.median(y_U))), path_effects=outline, fontsize=11,
                fontweight="bold", ha="center", va="center",
            )  # fmt: skip
    if not listed:
        handles.append(Line2D([], [], linestyle="", label=f"{units.experts} experts, a colour each"))
    panel.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)


def _dot_size(units: UnitMap) -> float:
    """Area in points² that keeps the panel about as full whatever the number of units."""
    return float(np.clip(16000 / len(units.home_U), 2.0, 30.0))
