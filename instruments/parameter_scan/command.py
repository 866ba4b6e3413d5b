"""`python -m pipeline mscan FILE`: show an .mscan file as a table, a Parquet file or a picture."""

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, Float32
from numpy.typing import NDArray
from tabulate import tabulate

from instruments.errors import ConfigError, ContractError, check_output, exit_code, say
from instruments.parameter_scan.file_format import VERSION, Rows
from instruments.parameter_scan.parameters import locate, module_of
from instruments.parameter_scan.reader import Mscan, read_mscan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize

COLUMNS = ("module", "weights", "blocks in", "blocks out", "activation", "gradient", "not measured", "error up to")


def summarise(scan: Mscan, only: Rows | None = None) -> str:
    """Facts of the file, and value ranges per kind of module, over all sequences or for one."""
    header = scan.header
    tokens = sum(one.tokens for one in scan.sequences)
    encoding = {"f32": "f32, lossless", "log16": "log16, 16 bits on each column's own logarithmic scale"}
    facts = [
        ("file", f"{scan.path} (.mscan version {VERSION}, {scan.end:,} bytes)"),
        ("model", header.model),
        ("created", header.created),
        ("parameters", f"{len(header.table.entries):,}, in blocks {header.table.block_width} wide"),
        ("sequences", f"{len(scan.sequences):,} of {tokens:,} tokens in {len(scan.segments)} segments"),
        ("encoding", encoding[header.encoding] + (", with values per token" if header.per_token else "")),
    ]
    facts += [(str(key), str(value)) for key, value in header.metadata.items()]
    if scan.torn:
        facts.append(("torn tail", f"{scan.torn:,} bytes that a killed writer had not sealed; not read"))
    if only is not None:
        one = only.sequences[0]
        facts.append(("sequence", f"number {one.number}, {one.name}, {one.tokens:,} tokens {one.source}".rstrip()))
    table = tabulate([*_module_rows(scan, only)], COLUMNS, tablefmt="simple", disable_numparse=True)
    return f"{tabulate(facts, tablefmt='plain', disable_numparse=True)}\n\n{table}\n"


def _module_rows(scan: Mscan, only: Rows | None) -> Iterator[tuple[str, ...]]:
    entries = scan.parameters.entries
    modules: dict[str, list[int]] = {}
    for column, entry in enumerate(entries):
        modules.setdefault(locate(entry.name)[1], []).append(column)
    activation, gradient = _norms(scan, only)
    bound = np.maximum(scan.error_bound("activation"), scan.error_bound("gradient"))
    for module, columns in modules.items():
        values = activation[:, columns], gradient[:, columns]
        inputs = sum(entries[column].in_blocks for column in columns)
        outputs = sum(entries[column].out_blocks for column in columns)
        share = float(np.isnan(values).sum() / max(1, 2 * values[0].size))
        yield (
            module, f"{len(columns)}", f"{inputs:,}", f"{outputs:,}", _range(values[0]), _range(values[1]),
            f"{share:.0%}" if share in {0, 1} else f"{share:.2%}", f"{bound[columns].max():.1e}",
        )  # fmt: skip


def _norms(scan: Mscan, only: Rows | None) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(S, P) activation and gradient of all sequences, or of one."""
    if only is None:
        return scan.activation(), scan.gradient()
    return only.arrays["activation"], only.arrays["gradient"]


def _range(values: NDArray[np.float32]) -> str:
    """Range of the measured values."""
    low = np.fmin.reduce(values, axis=None, initial=np.inf)
    high = np.fmax.reduce(values, axis=None, initial=-np.inf)
    return f"{low:.3g} … {high:.3g}" if low <= high else "–"


@dataclass(frozen=True)
class Grid:
    """One value per layer and module, NaN where a layer lacks the module; and values of weights outside the layers."""

    layers: tuple[int, ...]
    modules: tuple[str, ...]  # within a layer: self_attn.q_proj
    values_LM: NDArray[np.float64]
    outside: dict[str, float]  # embed_tokens, lm_head


def delta_sc(
    activation_SP: Float32[np.ndarray, "S P"], gradient_SP: Float32[np.ndarray, "S P"]
) -> Float[np.ndarray, "P"]:
    """Mean over sequences of z(activation) - z(gradient), with z over the parameters of a sequence; NaN: not measured.

    Returns:
        ``(P,)`` float64; NaN if no sequence measured both norms of the parameter.
    Numerics: float64; a z-score with zero deviation is 0.
    """
    difference_SP = _z(activation_SP) - _z(gradient_SP)
    measured_P = np.isfinite(difference_SP).sum(0)
    total_P = np.nansum(difference_SP, 0)
    return np.where(measured_P > 0, total_P / np.maximum(measured_P, 1), np.nan)


def grid_by_layer(names: Iterable[str], values_P: Float[np.ndarray, "P"]) -> Grid:
    """Arrange values of parameters by layer and module, modules in the order of first appearance.

    Modules of two stacks of layers that would have one name (encoder and decoder) have their full names.
    """
    names = list(names)
    times = Counter(map(locate, names))
    shared = {module for (_layer, module), count in times.items() if count > 1}
    placed = []
    for name, value in zip(names, values_P, strict=True):
        layer, module = locate(name)
        placed.append((layer, module_of(name) if module in shared else module, float(value)))
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
    # By rounding, equal values have a relative deviation of about 1e-16.
    flat_S1 = spread_S1 <= 1e-12 * np.abs(np.where(known_SP, values_SP, 0)).max(1, keepdims=True, initial=0)
    return np.asarray(centred_SP * ~flat_S1 / np.where(flat_S1, 1, spread_S1))


COLOURS = "RdBu_r"
MISSING = "#dddddd"
LEGIBLE = 400  # most cells for which numbers are drawn


def draw_delta_sc(grid: Grid, path: Path, *, title: str) -> None:
    """Write a PNG; equal grids and library versions give equal bytes."""
    from matplotlib.cm import ScalarMappable  # noqa: PLC0415 - slow to import
    from matplotlib.colors import Normalize  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    rows = len(grid.layers)
    columns = max(len(grid.modules), len(grid.outside))
    figure = Figure(figsize=(3.0 + 0.95 * columns, 2.6 + 0.32 * rows), dpi=110, layout="constrained")
    figure.suptitle(title, fontsize=13)
    heights = [height for height in (rows, bool(grid.outside)) if height] or [1]
    panels = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0].tolist()
    sizes = np.abs([*grid.values_LM.ravel(), *grid.outside.values()])
    known = sizes[np.isfinite(sizes)]
    limit = float(np.quantile(known, 0.98) if len(known) else 0) or 1.0  # the most extreme 2 % are clipped
    scale = Normalize(-limit, limit)
    if rows:
        # q_proj for self_attn.q_proj, unless two modules would get the same name.
        last = [module.rpartition(".")[2] for module in grid.modules]
        names = [name if last.count(name) == 1 else full for name, full in zip(last, grid.modules, strict=True)]
        _draw_cells(panels[0], grid.values_LM, names, scale)
        panels[0].set_ylabel("layer")
        panels[0].set_yticks(range(rows), [str(layer) for layer in grid.layers])
        panels[0].tick_params(axis="x", rotation=30)
    if grid.outside:
        _draw_cells(panels[-1], np.array([[*grid.outside.values()]]), [*grid.outside], scale)
        panels[-1].set_yticks([])
    bar = figure.colorbar(ScalarMappable(scale, COLOURS), ax=panels, extend="both", shrink=0.9)
    bar.set_label("z(activation) − z(gradient)")
    figure.savefig(path, format="png", metadata={"Software": None})


def _draw_cells(panel: "Axes", values: NDArray[np.float64], columns: list[str], scale: "Normalize") -> None:
    panel.imshow(values, cmap=COLOURS, norm=scale, aspect="auto", interpolation="nearest")
    panel.set_facecolor(MISSING)  # visible where there is no value
    panel.set_xticks(range(len(columns)), columns)
    if values.size > LEGIBLE:
        return
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            at_an_end = abs(float(scale(value)) - 0.5) > 0.32  # the dark colours
            ink = "white" if at_an_end else "black"
            panel.text(column, row, f"{value:z.2f}", ha="center", va="center", fontsize=8, color=ink)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    0 done, 1 a file cannot be read or written, or was not closed, 2 the command line is wrong, 130 interrupted.
    """
    wanted = _parser().parse_args(words)
    return exit_code(lambda: _run(wanted))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pipeline mscan", description="Look into an .mscan file.")
    parser.add_argument("file", type=Path, help="the file")
    parser.add_argument("--parquet", type=Path, metavar="OUT", help="write all norms as a long table")
    parser.add_argument("--delta-sc", type=Path, metavar="OUT", help="draw z(activation) - z(gradient) as a PNG")
    parser.add_argument("--sequence", metavar="NAME|NUMBER", help="only this sequence")
    return parser


def _run(wanted: argparse.Namespace) -> None:
    check_output(wanted.parquet, wanted.delta_sc)
    for out in filter(None, (wanted.parquet, wanted.delta_sc)):
        if out.exists() and wanted.file.exists() and out.samefile(wanted.file):
            raise ConfigError(f"{out} is the .mscan file itself", where="command line", do="name another output file")
    scan = read_mscan(wanted.file)
    only = None if wanted.sequence is None else _select(scan, wanted.sequence)
    say(summarise(scan, only))
    if wanted.parquet:
        sys.stdout.write(f"\n{wanted.parquet}: {_export(scan, only, wanted.parquet):,} rows\n")
    if wanted.delta_sc:
        _draw(scan, only, wanted.delta_sc)
        sys.stdout.write(f"\n{wanted.delta_sc}\n")
    sys.stdout.flush()
    if not scan.closed:
        raise ContractError(
            f"{scan.path.name} was not closed: its end is missing, or its writer is still at work",
            where=f"{scan.path}, after {len(scan.sequences):,} sequences; {scan.torn:,} unusable bytes follow",
            do="wait for the writer, copy the file again, or go on scanning into it",
        )


def _select(scan: Mscan, wanted: str) -> Rows:
    """The sequence with that name, or else with that number."""
    named = any(sequence.name == wanted for sequence in scan.sequences)
    is_number = not named and wanted.isascii() and wanted.isdecimal() and len(wanted) < 19
    return scan.select(int(wanted) if is_number else wanted)


def _export(scan: Mscan, only: Rows | None, out: Path) -> int:
    try:
        from instruments.parameter_scan.parquet import export_parquet  # noqa: PLC0415 - an optional extra
    except ModuleNotFoundError as error:
        raise ConfigError(
            "--parquet needs pyarrow, which is not installed", where="command line", do="pip install -e '.[parquet]'"
        ) from error
    return export_parquet(scan, out, only)


def _draw(scan: Mscan, only: Rows | None, out: Path) -> None:
    activation, gradient = _norms(scan, only)
    what = f"mean of {len(activation)} sequences" if only is None else only.sequences[0].name
    grid = grid_by_layer(scan.parameters.names, delta_sc(activation, gradient))
    draw_delta_sc(grid, out, title=f"ΔSC of {scan.header.model}\n{what}")
