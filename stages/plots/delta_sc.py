"""ΔSC as a heat map: one row a layer, one column a module, and below it what lies outside the layers."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from numpy.typing import NDArray

from models.mscan.delta_sc import Grid

MISSING = "#dddddd"
LEGIBLE = 400  # more cells than this carry no number


def draw_delta_sc(grid: Grid, path: Path, *, title: str) -> None:
    """Write a PNG; the same grid and libraries give the same bytes."""
    rows = max(1, len(grid.layers))
    columns = max(len(grid.modules), len(grid.outside), 1)
    figure = Figure(figsize=(3.0 + 0.95 * columns, 2.6 + 0.32 * rows), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=13)
    scale = _scale(np.array([*grid.values_LM.ravel(), *grid.outside.values()]))
    panels = figure.subplots(2, 1, height_ratios=[rows, 1], squeeze=False)[:, 0]
    drawn = [_draw_layers(panels[0], grid, scale), _draw_outside(panels[1], grid, scale)]
    bar = figure.colorbar(drawn[0], ax=panels.tolist(), extend="both", shrink=0.9)
    bar.set_label("z(activation) − z(gradient)")
    figure.savefig(path, format="png", metadata={"Software": None})


def _scale(values: NDArray[np.float64]) -> Normalize:
    """Symmetric about 0; the extreme 2 % share the end's colour."""
    known = np.abs(values[np.isfinite(values)])
    limit = float(np.quantile(known, 0.98)) if len(known) else 0.0
    return Normalize(-(limit or 1.0), limit or 1.0)


def _draw_layers(panel: Axes, grid: Grid, scale: Normalize) -> AxesImage:
    labels = _shortened(grid.modules)
    panel.set_ylabel("layer")
    panel.set_yticks(range(len(grid.layers)), [str(layer) for layer in grid.layers])
    return _draw(panel, grid.values_LM, labels, scale)


def _draw_outside(panel: Axes, grid: Grid, scale: Normalize) -> AxesImage:
    panel.set_yticks([])
    panel.set_visible(bool(grid.outside))
    return _draw(panel, np.array([[*grid.outside.values()]]), [*grid.outside], scale)


def _draw(panel: Axes, values: NDArray[np.float64], columns: list[str], scale: Normalize) -> AxesImage:
    image = panel.imshow(values, cmap="RdBu_r", norm=scale, aspect="auto", interpolation="nearest")
    panel.set_facecolor(MISSING)  # shines through where there is no value
    panel.set_xticks(range(len(columns)), columns, rotation=30, ha="right", rotation_mode="anchor")
    if values.size <= LEGIBLE:
        for (row, column), value in np.ndenumerate(values):
            if np.isfinite(value):
                dark = abs(float(scale(value)) - 0.5) > 0.35
                colour = "white" if dark else "black"
                panel.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8, color=colour)
    return image


def _shortened(modules: tuple[str, ...]) -> list[str]:
    """q_proj for self_attn.q_proj, unless two modules would then be called the same."""
    last = [module.rpartition(".")[2] for module in modules]
    return [name if last.count(name) == 1 else module for name, module in zip(last, modules, strict=True)]
