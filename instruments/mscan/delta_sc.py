"""ΔSC = z(activation) - z(gradient): which weights work much and would change little; and its picture."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float, Float32
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from numpy.typing import NDArray

from instruments.mscan.header import locate


@dataclass(frozen=True)
class Grid:
    """One value per layer and module, NaN where a layer has no such module; and those of weights outside the layers."""

    layers: tuple[int, ...]
    modules: tuple[str, ...]  # within a layer: self_attn.q_proj
    values_LM: NDArray[np.float64]
    outside: dict[str, float]  # embed_tokens, lm_head


def delta_sc(
    activation_SP: Float32[np.ndarray, "S P"], gradient_SP: Float32[np.ndarray, "S P"]
) -> Float[np.ndarray, "P"]:
    """Mean over sequences of z(activation) - z(gradient), each z over the parameters of one sequence.

    Args:
        activation_SP: ``(S, P)`` norms of the inputs; NaN is not measured.
        gradient_SP: ``(S, P)`` norms of the gradients.
    Returns:
        ``(P,)`` float64; NaN for a parameter that no sequence measured both ways.
    Numerics: float64; a z-score without spread is 0.
    """
    difference_SP = _z(activation_SP) - _z(gradient_SP)
    measured_P = np.isfinite(difference_SP).sum(0)
    total_P = np.nansum(difference_SP, 0)
    return np.where(measured_P > 0, total_P / np.maximum(measured_P, 1), np.nan)


def grid_by_layer(names: Iterable[str], values_P: Float[np.ndarray, "P"]) -> Grid:
    """Lay values of parameters out by layer and module; modules keep the order in which they first appear."""
    placed = [(*locate(name), float(value)) for name, value in zip(names, values_P, strict=True)]
    layers = sorted({layer for layer, _, _ in placed if layer is not None})
    modules = list(dict.fromkeys(module for layer, module, _ in placed if layer is not None))
    outside, values_LM = {}, np.full((len(layers), len(modules)), np.nan)
    for layer, module, value in placed:
        if layer is None:
            outside[module] = value
        else:
            values_LM[layers.index(layer), modules.index(module)] = value
    return Grid(tuple(layers), tuple(modules), values_LM, outside)


def _z(values_SP: NDArray[np.float32]) -> NDArray[np.float64]:
    """Standard scores along each row; NaN stays NaN."""
    known_SP = np.isfinite(values_SP)
    count_S1 = np.maximum(known_SP.sum(1, keepdims=True), 1)
    centred_SP = values_SP - np.where(known_SP, values_SP, 0).sum(1, keepdims=True, dtype=np.float64) / count_S1
    spread_S1 = np.sqrt((np.where(known_SP, centred_SP, 0) ** 2).sum(1, keepdims=True) / count_S1)
    # Rounding leaves equal values a spread of some 1e-16 of their size.
    flat_S1 = spread_S1 <= 1e-12 * np.abs(np.where(known_SP, values_SP, 0)).max(1, keepdims=True, initial=0)
    return np.asarray(centred_SP * ~flat_S1 / np.where(flat_S1, 1, spread_S1))


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
