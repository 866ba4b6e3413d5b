"""Charts of the report: SVG by matplotlib, in colours that suit a light and a dark page."""

from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any

import numpy as np
from matplotlib import rc_context, rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler
from matplotlib.ticker import EngFormatter, MaxNLocator

WIDTH = 520  # CSS pixels, which are matplotlib's points (72 per inch)
STYLE: dict[str, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "tiny-onn", "font.size": 12, "text.parse_math": False,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True,
    "axes.grid.axis": "y", "legend.frameon": False, "figure.facecolor": "none", "axes.facecolor": "none",
}  # fmt: skip
INK, GRID, LINES = "#7b8590", "#7b859055", ["#2f86e0", "#d96a1f"]
INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")

Points = Sequence[tuple[float, float]]  # x, y


@dataclass(frozen=True)
class Chart:
    """A chart with its title and caption; the picture is a data URI."""

    title: str
    caption: str
    picture: str


def draw(title: str, caption: str, paint: Callable[[Axes], None], height: float = 240) -> Chart:
    """Let `paint` draw into the axes of a figure."""
    style = STYLE | dict.fromkeys(INKED, INK) | {"grid.color": GRID, "axes.prop_cycle": cycler(color=LINES)}
    with rc_context(style):  # type: ignore[arg-type] # a mapping of names that matplotlib checks
        figure = Figure(figsize=(WIDTH / 72, height / 72), layout="constrained")
        paint(figure.add_subplot())
        out = StringIO()
        figure.savefig(out, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    picture = f"data:image/svg+xml;base64,{b64encode(out.getvalue().encode()).decode()}"
    return Chart(title, caption, picture)


def draw_bars(title: str, caption: str, bars: Sequence[tuple[str, float, bool]]) -> Chart:
    """Horizontal bars from zero: name, value, and whether it is highlighted."""

    def paint(axes: Axes) -> None:
        names, values, strong = zip(*bars, strict=True)
        drawn = axes.barh(
            range(len(bars)), values, color=["C0" if found else rcParams["axes.edgecolor"] for found in strong]
        )
        axes.bar_label(drawn, [f"{value:+.4f}" for value in values], padding=4)
        axes.set_yticks(range(len(bars)), [name if len(name) < 40 else f"{name[:38]}…" for name in names])
        axes.invert_yaxis()
        axes.margins(x=0.18)
        axes.grid(visible=False)
        axes.xaxis.set_visible(False)

    return draw(title, caption, paint, 30 * len(bars) + 20)


def draw_lines(
    title: str, caption: str, lines: Mapping[str, Points], *, x: str = "layer", chance: float | None = None
) -> Chart:
    """One or two named lines; `chance` is a share from 0 to 1 to compare with."""

    def paint(axes: Axes) -> None:
        for name, points in lines.items():
            axes.plot(*np.array(points, dtype=float).reshape(-1, 2).T, marker="o", markersize=4, label=name)
        if chance is not None:
            axes.axhline(chance, linestyle=":", color=rcParams["axes.edgecolor"], label=f"chance {chance:.0%}")
            axes.set_ylim(0, 1.04)
        axes.axhline(0, linewidth=1, color=rcParams["axes.edgecolor"])
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_xlabel(x)
        if len(lines) > 1 or chance is not None:
            axes.legend()

    return draw(title, caption, paint)
