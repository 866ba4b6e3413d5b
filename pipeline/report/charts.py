"""Charts of the report: inline SVG by matplotlib, in colours of the page's style sheet, with values as tooltips.

Widths are in CSS pixels, drawn as matplotlib's points (72 per inch).
"""

import re
import warnings
from collections.abc import Mapping, Sequence
from hashlib import sha256
from io import StringIO
from textwrap import shorten, wrap
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from pipeline.report.evaluations import Point
from pipeline.report.words import Method, nats, percent

NARROW, HALF, WIDE = 340, 440, 860  # a phone, half of the page, the whole page
LETTER = 6.8  # pixels of a letter, on average
COLOURS = {  # name in the style sheet → colour on a light and on a dark page
    "paper": ("#fcfcfb", "#15171b"), "card": ("#ffffff", "#1c1f24"), "ink": ("#1b1f24", "#e7e9ec"),
    "muted": ("#59636e", "#9ba5b0"), "rule": ("#e2e5e9", "#30353c"), "axis": ("#8b95a1", "#6b7580"),
    "moe": ("#0b5fb5", "#62b0ff"), "mask": ("#b84a0b", "#ff9d61"), "random": ("#6a717b", "#a7afb9"),
    "oracle": ("#0a7a58", "#45d1a3"), "extra-0": ("#94388a", "#e491d8"), "extra-1": ("#806400", "#dfc04d"),
    "extra-2": ("#a3243b", "#ff8fa1"), "load-1": ("#2f74ba", "#549be6"), "load-2": ("#75a9d9", "#3a70a8"),
    "load-3": ("#adcbe7", "#2c5175"), "load-4": ("#d6e4f1", "#263a4e"), "load-5": ("#eceeef", "#2d3137"),
    "load-6": ("#f7e0cf", "#48372b"), "load-7": ("#f0b88f", "#7a4d2b"), "load-8": ("#e08548", "#bd6c30"),
    "ridge": ("#bcd2ea", "#29415a"),
}  # fmt: skip
INK = {name: light for name, (light, _dark) in COLOURS.items()}
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "tiny-onn", "font.size": 12, "text.parse_math": False,
    "axes.titlesize": 12, "axes.titlelocation": "left", "axes.titlecolor": INK["muted"], "text.color": INK["ink"],
    "axes.labelcolor": INK["muted"], "xtick.color": INK["muted"], "ytick.color": INK["muted"],
    "axes.edgecolor": INK["axis"], "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False,
    "axes.grid": True, "axes.axisbelow": True, "grid.color": INK["rule"], "legend.frameon": False,
    "figure.facecolor": "none", "axes.facecolor": "none", "xtick.major.size": 0, "ytick.major.size": 0,
    "xtick.major.pad": 8, "axes.grid.axis": "y", "axes.xmargin": 0.03, "lines.linewidth": 2.5,
}  # fmt: skip
LOAD_BOUNDS = (0.25, 0.5, 0.75, 0.9, 1.1, 4 / 3, 2.0, 4.0)  # a load of 1 is an even share
LOADS = ("none", "below ¼", "from ¼", "from ½", "from ¾", "from 0.9", "from 1.1", "from 1⅓", "from 2", "4 and more")
BINS = 60
SHOWN = (0.002, 0.998)  # quantiles of all scores at the ends of the ridges' axis; the end bins hold the other scores

Curves = Mapping[Method, Sequence[Point]]
Line = Sequence[tuple[float, float, str]]  # x, y, tooltip
Reference = tuple[float, str]  # y, its label


@rc_context(STYLE)
def draw_bars(title: str, gaps: Sequence[tuple[Method, float]], width: int) -> Markup:
    """Horizontal bars from zero with name and value."""
    room = min(max((LETTER * len(method.name) for method, _gap in gaps), default=0), 0.42 * width)
    axes = _axes(width, 30 * len(gaps) + 8, left=room + 10, right=10, top=4, bottom=4)
    names = ["\n".join(wrap(method.name, int(room / LETTER) + 1, max_lines=2, placeholder="…")) for method, _ in gaps]
    colours = [to_rgba(INK[method.ink], 0.4 if method.before else 1.0) for method, _gap in gaps]
    lengths = [gap if np.isfinite(gap) else np.nan for _method, gap in gaps]
    bars = axes.barh(range(len(gaps)), lengths, height=0.55, color=colours)
    axes.bar_label(bars, [nats(gap) for _method, gap in gaps], padding=5)
    axes.axvline(0, color=INK["axis"], linewidth=1)
    axes.set_yticks(range(len(gaps)), names, color=INK["ink"])
    axes.margins(x=80 / (width - room - 90))
    axes.use_sticky_edges = False
    if not any(length < 0 for length in lengths):
        axes.set_xlim(left=0)
    axes.set_ylim(len(gaps) - 0.6, -0.4)
    axes.grid(visible=False)
    axes.xaxis.set_visible(False)
    axes.spines["bottom"].set_visible(False)
    return _svg(axes, title)


@rc_context(STYLE)
def draw_curves(
    title: str, y_name: str, curves: Curves, width: int, *, strays: Sequence[Point] = (), dense: bool = False
) -> Markup:
    """Curves over the share of active neurons, widest first; whiskers span the seeds; `strays` are single points."""
    aside, room = width > NARROW, 32 if width > NARROW else 42
    axes = _axes(width, 350 if aside else 300 + 18 * len(curves), right=260 if aside else 14,
                 bottom=46 if aside else 56 + 18 * len(curves))  # fmt: skip
    axes.plot([point.x for point in strays], [point.mean for point in strays], "o", mfc="none", color=INK["axis"])
    ordered = sorted(curves.items(), key=lambda item: -item[1][-1].mean)
    for method, points in ordered:
        colour, x, mean = INK[method.ink], [point.x for point in points], [point.mean for point in points]
        axes.vlines(x, [point.low for point in points], [point.high for point in points], colour, linewidth=1.25)
        axes.plot(x, mean, color=colour, marker=method.marker, markersize=7, mfc=INK["card"] if method.before else None,
                  linestyle="--" if method.before else "-", linewidth=1.5 if method.before else 2.5,
                  label=shorten(method.name, room, placeholder="…"))  # fmt: skip
        _hint_at(axes, [(point.x, point.mean, f"{method.name}, {_describe(point)}") for point in points])
    if dense:
        axes.plot([1.0], [0.0], "o", color=INK["ink"])
        axes.annotate("dense", (1.0, 0.0), (-4, 10), textcoords="offset points")
    _start_at_zero(axes)
    axes.xaxis.set_inverted(True)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol="\N{NO-BREAK SPACE}%"))
    axes.set(title=y_name)
    axes.set_xlabel("FFN neurons active per token", loc="right")
    if curves:
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5)) if aside else axes.figure.legend(loc="lower left")
    return _svg(axes, title)


def _describe(point: Point) -> str:
    spread = f", {point.low:+.4f} to {point.high:+.4f} over {point.count}" if point.count > 1 else ""
    return f"{percent(point.x)}: {point.mean:+.4f}{spread}"


@rc_context(STYLE)
def draw_lines(
    title: str, y_name: str, lines: Mapping[str, Line], *, x_name: str = "layer", reference: Reference | None = None
) -> Markup:
    """One or two named lines; with a `reference`, a horizontal line to compare with, y is a share from 0 to 1."""
    axes = _axes(HALF, 240)
    for (name, points), ink, weight in zip(lines.items(), ("moe", "mask"), (2.5, 1.5), strict=False):
        x, y = [point[0] for point in points], [point[1] for point in points]
        axes.plot(x, y, color=INK[ink], label=name, linewidth=weight, marker="o", markersize=4 if len(x) <= 40 else 2)
        _hint_at(axes, points)
    if reference is not None:
        value, words = reference
        axes.axhline(value, color=INK["muted"], linestyle=":", linewidth=1.5)
        axes.annotate(words, (1, value), (0, 4), ("axes fraction", "data"), "offset points", ha="right",
                      color=INK["muted"])  # fmt: skip
        axes.set_ylim(0, 1.04)
    _start_at_zero(axes)
    axes.update_datalim([(0, 0)])
    axes.autoscale_view()
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set(title=y_name)
    axes.set_xlabel(x_name, loc="right")
    if len(lines) > 1:
        axes.legend(labelcolor="linecolor")
    return _svg(axes, title)


@rc_context(STYLE)
def draw_loads(title: str, loads: Sequence[Sequence[float]], width: int) -> Markup:
    """A row for each layer with its experts from the most to the least loaded, coloured by class of load."""
    row, columns = 24 if len(loads) <= 12 else 14, 5 if width > NARROW else 3
    below = 40 + 18 * -(-len(LOADS) // columns)
    axes = _axes(width, row * len(loads) + below + 8, top=8, bottom=below)
    start_L, handles = np.zeros(len(loads)), []
    for kind in reversed(range(len(LOADS))):
        members = [sorted(load for load in layer if load_class(load) == kind) for layer in loads]
        colour = INK["card" if kind == 0 else "mask" if kind == 9 else f"load-{kind}"]
        edge = INK["axis" if kind == 0 else "card"]
        handles.append(Patch(facecolor=colour, edgecolor=edge, linewidth=0.6, label=LOADS[kind]))
        bars = axes.barh(range(len(loads)), [len(layer) for layer in members], left=start_L, height=0.88, color=colour,
                         edgecolor=edge, linewidth=0.6)  # fmt: skip
        for layer, (bar, found) in enumerate(zip(bars, members, strict=True)):
            bar.set_visible(bool(found))
            if found:
                experts = f"{len(found)} experts" if len(found) > 1 else "an expert"
                low, high = f"{found[0]:.2f}", f"{found[-1]:.2f}"
                _hint(bar, f"layer {layer}: {experts} of load {low}" + (f" to {high}" if high != low else ""))
        start_L += [len(layer) for layer in members]
    axes.set(xlim=(0, max(start_L)), xticks=[0, max(start_L)], xticklabels=[])
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    axes.text(0, len(loads) - 0.4, "busiest expert", va="top", color=INK["muted"])
    axes.text(max(start_L), len(loads) - 0.4, "idlest", va="top", ha="right", color=INK["muted"])
    axes.set(ylim=(len(loads) - 0.5, -0.5), yticks=_rows(len(loads)))
    axes.figure.legend(handles=handles[::-1], loc="lower center", ncols=columns, labelcolor=INK["muted"])
    return _svg(axes, title)


def load_class(load: float) -> int:
    """Index in LOADS: 0 no load, 5 about the even share, 9 at least four times the even share."""
    return int(np.digitize(load, LOAD_BOUNDS)) + 1 if load > 0 else 0


@rc_context(STYLE)
def draw_ridges(title: str, x_name: str, scores_LF: NDArray[np.float64], width: int) -> Markup:
    """The distribution of each layer's scores, layer 0 on top; a line marks the middle half, a tick the median."""
    low, high = np.quantile(scores_LF, SHOWN)
    edges = np.linspace(low, high, BINS + 1) if high - low > 1e-9 else np.linspace(low - 0.5, low + 0.5, BINS + 1)
    counts_LB = [np.histogram(np.clip(row_F, edges[0], edges[-1]), edges)[0] for row_F in scores_LF]
    heights_LB = np.array(counts_LB) * 2.1 / np.max(counts_LB)  # in units of the distance between rows
    row = 46 if len(scores_LF) <= 6 else 30 if len(scores_LF) <= 12 else 17
    axes = _axes(width, row * (len(scores_LF) + 1.4) + 74)
    quartiles_L3 = np.quantile(scores_LF, (0.25, 0.5, 0.75), axis=1).T
    for layer, ((first, median, third), height_B) in enumerate(zip(quartiles_L3, heights_LB, strict=True)):
        ridge = axes.fill_between((edges[1:] + edges[:-1]) / 2, layer, layer - height_B, edgecolor=INK["moe"],
                                  facecolor=INK["ridge"])  # fmt: skip
        _hint(ridge, f"layer {layer}: median {median:.3g}, middle half {first:.3g} to {third:.3g}")
        axes.plot([first, third], [layer, layer], color=INK["ink"], zorder=3)
        axes.plot([median, median], [layer - 0.15, layer + 0.06], color=INK["ink"], linewidth=1.5, zorder=3)
    axes.grid(axis="x")
    axes.grid(visible=False, axis="y")
    axes.set(xlim=(edges[0], edges[-1]), ylim=(len(scores_LF) - 0.6, -2.2), yticks=_rows(len(scores_LF)), title="layer")
    axes.set_xlabel(x_name, loc="right")
    return _svg(axes, title)


def _rows(layers: int) -> range:
    """The layers with a tick label: at most 16, evenly spaced."""
    return range(0, layers, -(-layers // 16))


def _start_at_zero(axes: Axes) -> None:
    axes.locator_params(axis="y", nbins=5)
    axes.axhline(0, color=INK["axis"], linewidth=1)
    if axes.dataLim.y0 > -1e-6 * axes.dataLim.height:
        axes.set_ylim(bottom=0)


def _axes(
    width: float, height: float, *, left: float = 50, right: float = 14, top: float = 28, bottom: float = 46
) -> Axes:
    figure = Figure(figsize=(width / 72, height / 72))
    return figure.add_axes((left / width, bottom / height, 1 - (left + right) / width, 1 - (top + bottom) / height))


def _hint(artist: Artist, words: str) -> None:
    """Give the artist a tooltip: `_svg` turns the name of its group into a title element."""
    artist.set_gid(f"hint {words.replace('-', '−')}")


def _hint_at(axes: Axes, points: Line) -> None:
    """Tooltips on invisible markers that are larger than the points."""
    for x, y, words in points[:: len(points) // 400 + 1]:
        _hint(axes.plot([x], [y], "o", markersize=10, color=INK["card"], alpha=0)[0], words)


def _svg(axes: Axes, title: str) -> Markup:
    """The figure as an inline SVG element; `title` is the label for screen readers."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    out = StringIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # values near the largest float, from a damaged file
        figure.savefig(out, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    width, height = figure.get_size_inches() * 72
    body = out.getvalue().partition("<defs>")[2].partition("</defs>")[2]  # without matplotlib's global style
    body = re.sub(r' clip-path="[^"]*"|<clipPath.*?</clipPath>', "", body, flags=re.DOTALL)  # nothing needs clipping
    body = re.sub(r'<g id="hint ([^"]*)">', r"<g><title>\1</title>", body)
    body = re.sub(r'<g id="[^"]*"', "<g", body).replace("xlink:href", "href")
    mark = sha256(body.encode()).hexdigest()[:8]  # makes ids unique among the charts of a page
    body = re.sub(r'( id="|href="#)', rf"\g<1>mark-{mark}-", body)
    for name, colour in INK.items():
        body = body.replace(colour, f"var(--{name})")
    head = f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" role="img" aria-label="{{}}">\n'
    return Markup(head).format(title) + Markup(body)
