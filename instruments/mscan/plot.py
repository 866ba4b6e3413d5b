"""ΔSC as a heat map: one row a layer, one column a module, and below it what lies outside the layers."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from numpy.typing import NDArray

from instruments.mscan.delta_sc import Grid

COLOURS = "RdBu_r"
MISSING = "#dddddd"
LEGIBLE = 400  # more cells than this carry no number


def draw_delta_sc(grid: Grid, path: Path, *, title: str) -> None:
    """Write a PNG; the same grid and libraries give the same bytes."""
    rows = len(grid.layers)
    columns = max(len(grid.modules), len(grid.outside))
    figure = Figure(figsize=(3.0 + 0.95 * columns, 2.6 + 0.32 * rows), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=13)
    heights = [height for height in (rows, bool(grid.outside)) if height] or [1]
    panels = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0].tolist()
    scale = _scale(np.array([*grid.values_LM.ravel(), *grid.outside.values()]))
    if rows:
        _plot_layers(panels[0], grid, scale)
    if grid.outside:
        _draw_cells(panels[-1], np.array([[*grid.outside.values()]]), [*grid.outside], scale)
        panels[-1].set_yticks([])
    bar = figure.colorbar(ScalarMappable(scale, COLOURS), ax=panels, extend="both", shrink=0.9)
    bar.set_label("z(activation) − z(gradient)")
    figure.savefig(path, format="png", metadata={"Software": None})


def _scale(values: NDArray[np.float64]) -> Normalize:
    """Symmetric about 0; the extreme 2 % share the end's colour."""
    known = np.abs(values[np.isfinite(values)])
    limit = float(np.quantile(known, 0.98)) if len(known) else 0.0
    return Normalize(-(limit or 1.0), limit or 1.0)


def _plot_layers(panel: Axes, grid: Grid, scale: Normalize) -> None:
    _draw_cells(panel, grid.values_LM, _shortened(grid.modules), scale)
    panel.set_ylabel("layer")
    panel.set_yticks(range(len(grid.layers)), [str(layer) for layer in grid.layers])
    panel.tick_params(axis="x", rotation=30)


def _draw_cells(panel: Axes, values: NDArray[np.float64], columns: list[str], scale: Normalize) -> None:
    panel.imshow(values, cmap=COLOURS, norm=scale, aspect="auto", interpolation="nearest")
    panel.set_facecolor(MISSING)  # shines through where there is no value
    panel.set_xticks(range(len(columns)), columns)
    if values.size > LEGIBLE:
        return
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            at_an_end = abs(float(scale(value)) - 0.5) > 0.32  # where the colours are dark
            ink = "white" if at_an_end else "black"
            panel.text(column, row, f"{value:z.2f}", ha="center", va="center", fontsize=8, color=ink)


def _shortened(modules: tuple[str, ...]) -> list[str]:
    """q_proj for self_attn.q_proj, unless two modules would then be called the same."""
    last = [module.rpartition(".")[2] for module in modules]
    return [name if last.count(name) == 1 else module for name, module in zip(last, modules, strict=True)]
