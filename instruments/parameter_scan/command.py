"""`python -m pipeline mscan FILE`: show an .mscan file as a table, a Parquet file or a picture."""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, Float32
from numpy.typing import NDArray
from tabulate import tabulate

from instruments.errors import ConfigError, ContractError, check_output, exit_code, say
from instruments.files import whole_file
from instruments.parameter_scan.file_format import VERSION, ParameterTable, Rows
from instruments.parameter_scan.reader import Mscan, read_mscan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize

COLUMNS = ("module", "weights", "blocks in", "blocks out", "activation", "gradient", "not measured", "error up to")


def locate(name: str) -> tuple[int | None, str]:
    """Layer and module of a weight: model.layers.3.mlp.up_proj.weight is (3, model.layers.*.mlp.up_proj)."""
    module = name.removesuffix(".weight")
    if (numbered := re.search(r"\.(\d+)\.", module)) is None:
        return None, module
    return int(numbered[1]), f"{module[: numbered.start()]}.*.{module[numbered.end() :]}"


def summarise(scan: Mscan) -> str:
    """Facts of the file, and value ranges per kind of module."""
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
    table = tabulate([*_module_rows(scan)], COLUMNS, tablefmt="simple", disable_numparse=True)
    return f"{tabulate(facts, tablefmt='plain', disable_numparse=True)}\n\n{table}\n"


def _module_rows(scan: Mscan) -> Iterator[tuple[str, ...]]:
    entries = scan.parameters.entries
    modules: dict[str, list[int]] = {}
    for column, entry in enumerate(entries):
        modules.setdefault(locate(entry.name)[1], []).append(column)
    activation, gradient = scan.activation(), scan.gradient()
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


def _range(values: NDArray[np.float32]) -> str:
    """Range of the measured values."""
    low = np.fmin.reduce(values, axis=None, initial=np.inf)
    high = np.fmax.reduce(values, axis=None, initial=-np.inf)
    return f"{low:.3g} … {high:.3g}" if low <= high else "–"


@dataclass(frozen=True)
class Grid:
    """One value per layer and module, NaN where a layer lacks the module; and values of weights outside the layers."""

    layers: tuple[int, ...]
    modules: tuple[str, ...]  # of `locate`
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


def grid_by_layer(names: Sequence[str], values_P: Float[np.ndarray, "P"]) -> Grid:
    """Arrange values of parameters by layer and module, modules in the order of first appearance."""
    placed = [locate(name) for name in names]
    layers = sorted({layer for layer, _module in placed if layer is not None})
    modules = list(dict.fromkeys(module for layer, module in placed if layer is not None))
    outside, values_LM = {}, np.full((len(layers), len(modules)), np.nan)
    for (layer, module), value in zip(placed, values_P, strict=True):
        if layer is None:
            outside[module] = float(value)
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
        _draw_cells(panels[0], grid.values_LM, _shorten(grid.modules), scale)
        panels[0].set_ylabel("layer")
        panels[0].set_yticks(range(rows), [str(layer) for layer in grid.layers])
        panels[0].tick_params(axis="x", rotation=30)
    if grid.outside:
        _draw_cells(panels[-1], np.array([[*grid.outside.values()]]), _shorten([*grid.outside]), scale)
        panels[-1].set_yticks([])
    bar = figure.colorbar(ScalarMappable(scale, COLOURS), ax=panels, extend="both", shrink=0.9)
    bar.set_label("z(activation) − z(gradient)")
    figure.savefig(path, format="png", metadata={"Software": None})


def _shorten(modules: Sequence[str]) -> list[str]:
    """q_proj for model.layers.*.self_attn.q_proj, unless two modules would get the same name."""
    last = [module.rpartition(".")[2] for module in modules]
    return [name if last.count(name) == 1 else full for name, full in zip(last, modules, strict=True)]


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


Part = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], NDArray[np.float32], NDArray[np.float32]]


def long_parts(table: ParameterTable, rows: Rows) -> Iterator[tuple[str, Part]]:
    """One sequence's norms by kind: columns of parameters, blocks, tokens (-1: none), and flat activation and gradient.

    Kinds: total, input, output and, if recorded, token: all parameters of the first token, then of the second ...
    """
    everyone, arrays = np.arange(len(table.entries), dtype=np.int32), rows.arrays
    counts = {
        "input": ([entry.in_blocks for entry in table.entries], "in_activation", "in_gradient"),
        "output": ([entry.out_blocks for entry in table.entries], None, "out_gradient"),
    }
    none = np.full_like(everyone, -1)
    yield "total", (everyone, none, none, arrays["activation"][0], arrays["gradient"][0])
    for kind, (blocks, activation, gradient) in counts.items():
        block = np.concatenate([none[:0], *(np.arange(count, dtype=np.int32) for count in blocks)])
        found = arrays[gradient][0]
        seen = arrays[activation][0] if activation else np.full_like(found, np.nan)
        yield kind, (np.repeat(everyone, blocks), block, np.full_like(block, -1), seen, found)
    if "token_activation" in arrays:
        seen, found = arrays["token_activation"], arrays["token_gradient"]
        token = np.repeat(np.arange(len(seen), dtype=np.int32), len(everyone))
        yield "token", (np.tile(everyone, len(seen)), np.full_like(token, -1), token, seen.ravel(), found.ravel())


def export_parquet(scan: Mscan, out: Path) -> int:
    """Write one long Parquet table and return the number of rows. Raises ConfigError: pyarrow is not installed.

    Columns: sequence (number), name, layer (null outside the layers), module, parameter, table (the kind in
    `long_parts`), block (null in total and token), token (position among the sequence's tokens; null elsewhere),
    activation (null in output), gradient. Values that were not measured are null.
    """
    try:
        import pyarrow as pa  # noqa: PLC0415 - an optional extra
        from pyarrow.parquet import ParquetWriter  # noqa: PLC0415
    except ModuleNotFoundError as error:
        do = "pip install -e '.[parquet]'"
        raise ConfigError("--parquet needs pyarrow, which is not installed", where="command line", do=do) from error
    text = pa.dictionary(pa.int32(), pa.string())
    schema = pa.schema(
        {
            "sequence": pa.int64(), "name": text, "layer": pa.int32(), "module": text, "parameter": text, "table": text,
            "block": pa.int32(), "token": pa.int32(), "activation": pa.float32(), "gradient": pa.float32(),
        }
    )  # fmt: skip
    layers, modules = zip(*map(locate, scan.parameters.names), strict=True)
    of_parameters = pa.array(layers, pa.int32()), pa.array(modules, text), pa.array(scan.parameters.names, text)
    written = 0
    with whole_file(out) as unfinished, ParquetWriter(unfinished, schema) as writer:
        for rows in (segment.rows(at, at + 1) for segment in scan.segments for at in range(len(segment.sequences))):
            (sequence,) = rows.sequences
            for kind, (parameter, block, token, activation, gradient) in long_parts(scan.parameters, rows):
                zeros = np.zeros_like(parameter)
                columns = [
                    np.full(len(parameter), sequence.number, np.int64),
                    pa.DictionaryArray.from_arrays(zeros, [sequence.name]),
                    *(column.take(pa.array(parameter)) for column in of_parameters),
                    pa.DictionaryArray.from_arrays(zeros, [kind]),
                    *(pa.array(places, mask=places < 0) for places in (block, token)),
                    *(pa.array(norms, from_pandas=True) for norms in (activation, gradient)),  # NaN is null
                ]
                writer.write_table(pa.table(columns, schema=schema))
                written += len(parameter)
    return written


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    0 done, 1 a file cannot be read or written, or was not closed, 2 the command line is wrong, 130 interrupted.
    """
    parser = argparse.ArgumentParser(prog="python -m pipeline mscan", description="Look into an .mscan file.")
    parser.add_argument("file", type=Path, help="the file")
    parser.add_argument("--parquet", type=Path, metavar="OUT", help="write all norms as a long table")
    parser.add_argument("--delta-sc", type=Path, metavar="OUT", help="draw z(activation) - z(gradient) as a PNG")
    wanted = parser.parse_args(words)
    return exit_code(lambda: _run(wanted))


def _run(wanted: argparse.Namespace) -> None:
    check_output(wanted.parquet, wanted.delta_sc)
    for out in filter(None, (wanted.parquet, wanted.delta_sc)):
        if out.exists() and wanted.file.exists() and out.samefile(wanted.file):
            raise ConfigError(f"{out} is the .mscan file itself", where="command line", do="name another output file")
    scan = read_mscan(wanted.file)
    say(summarise(scan))
    if wanted.parquet:
        sys.stdout.write(f"\n{wanted.parquet}: {export_parquet(scan, wanted.parquet):,} rows\n")
    if wanted.delta_sc:
        grid = grid_by_layer(scan.parameters.names, delta_sc(scan.activation(), scan.gradient()))
        title = f"ΔSC of {scan.header.model}\nmean of {len(scan.sequences)} sequences"
        draw_delta_sc(grid, wanted.delta_sc, title=title)
        sys.stdout.write(f"\n{wanted.delta_sc}\n")
    sys.stdout.flush()
    if not scan.closed:
        raise ContractError(
            f"{scan.path.name} was not closed: its end is missing, or its writer is still at work",
            where=f"{scan.path}, after {len(scan.sequences):,} sequences; {scan.torn:,} unusable bytes follow",
            do="wait for the writer, copy the file again, or go on scanning into it",
        )
