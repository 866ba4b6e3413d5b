"""`python -m pipeline mscan FILE`: show an .mscan file as a table, and its ΔSC as numbers or a picture."""

import argparse
import math
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from instruments.errors import ConfigError, ContractError, align, check_output, exit_code, say
from instruments.files import write_text
from instruments.parameter_scan.file_format import VERSION
from instruments.parameter_scan.reader import Mscan, read_mscan
from instruments.shapes import Float, Float32

COLUMNS = ("module", "weights", "blocks in", "blocks out", "activation", "gradient", "not measured")


def locate(name: str) -> tuple[int | None, str]:
    """Layer and module of a weight: model.layers.3.mlp.up_proj.weight is (3, model.layers.*.mlp.up_proj)."""
    module = name.removesuffix(".weight")
    if (numbered := re.search(r"\.(\d{1,9})\.", module)) is None:
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
        ("encoding", encoding[header.encoding]),
    ]
    facts += [(str(key), str(value)) for key, value in header.metadata.items()]
    if scan.torn:
        facts.append(("torn tail", f"{scan.torn:,} bytes that a killed writer had not sealed; not read"))
    return "\n".join([*align(facts), "", *align([COLUMNS, *_module_rows(scan)]), ""])


def _module_rows(scan: Mscan) -> Iterator[tuple[str, ...]]:
    entries = scan.parameters.entries
    modules: dict[str, list[int]] = {}
    for column, entry in enumerate(entries):
        modules.setdefault(locate(entry.name)[1], []).append(column)
    activation, gradient = scan.activation(), scan.gradient()
    for module, columns in modules.items():
        values = activation[:, columns], gradient[:, columns]
        inputs = sum(entries[column].in_blocks for column in columns)
        outputs = sum(entries[column].out_blocks for column in columns)
        share = float(np.isnan(values).sum() / max(1, 2 * values[0].size))
        yield (
            module, f"{len(columns)}", f"{inputs:,}", f"{outputs:,}", _range(values[0]), _range(values[1]),
            f"{share:.0%}" if share in {0, 1} else f"{share:.2%}",
        )  # fmt: skip


def _range(values: NDArray[np.float32]) -> str:
    """Range of the measured values."""
    low = np.fmin.reduce(values, axis=None, initial=np.inf)
    high = np.fmax.reduce(values, axis=None, initial=-np.inf)
    return f"{low:.3g} … {high:.3g}" if low <= high else "–"


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


def grid_by_layer(
    names: Sequence[str], values_P: Float[np.ndarray, "P"]
) -> tuple[list[int | None], list[str], Float[np.ndarray, "L M"]]:
    """The layers (None: outside the layers), the modules of `locate`, and each pair's value, NaN where it lacks one."""
    placed = [locate(name) for name in names]
    layers = sorted({layer for layer, _module in placed}, key=lambda layer: -1 if layer is None else layer)
    modules = list(dict.fromkeys(module for _layer, module in placed))
    values_LM = np.full((len(layers), len(modules)), np.nan)
    for (layer, module), value in zip(placed, values_P, strict=True):
        values_LM[layers.index(layer), modules.index(module)] = value
    return layers, modules, values_LM


def _z(values_SP: NDArray[np.float32]) -> NDArray[np.float64]:
    """Standard scores along each row; NaN stays NaN."""
    known_SP = np.isfinite(values_SP)
    count_S1 = np.maximum(known_SP.sum(1, keepdims=True), 1)
    centred_SP = values_SP - np.where(known_SP, values_SP, 0).sum(1, keepdims=True, dtype=np.float64) / count_S1
    spread_S1 = np.sqrt((np.where(known_SP, centred_SP, 0) ** 2).sum(1, keepdims=True) / count_S1)
    # By rounding, equal values have a relative deviation of about 1e-16.
    flat_S1 = spread_S1 <= 1e-12 * np.abs(np.where(known_SP, values_SP, 0)).max(1, keepdims=True, initial=0)
    return np.asarray(centred_SP * ~flat_S1 / np.where(flat_S1, 1, spread_S1))


def draw_delta_sc(names: Sequence[str], values_P: Float[np.ndarray, "P"], path: Path, *, title: str) -> None:
    """Write a PNG of `grid_by_layer`; equal values and library versions give equal bytes."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - slow to import

    layers, modules, values_LM = grid_by_layer(names, values_P)
    rows, columns = values_LM.shape
    figure = Figure(figsize=(3.0 + 0.95 * columns, 2.6 + 0.32 * rows), dpi=110, layout="constrained")
    panel = figure.subplots()
    panel.set_title(title, fontsize=13)
    known = np.abs(values_LM[np.isfinite(values_LM)])
    limit = float(np.quantile(known, 0.98) if len(known) else 0) or 1.0  # the most extreme 2 % are clipped
    picture = panel.imshow(values_LM, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest")
    panel.set_facecolor("#dddddd")  # visible where there is no value
    # q_proj for model.layers.*.self_attn.q_proj, unless two modules would get the same name.
    last = [module.rpartition(".")[2] for module in modules]
    short = [name if last.count(name) == 1 else full for name, full in zip(last, modules, strict=True)]
    panel.set_xticks(range(columns), short, rotation=30, ha="right")
    panel.set_yticks(range(rows), ["" if layer is None else str(layer) for layer in layers])
    panel.set_ylabel("layer")
    bar = figure.colorbar(picture, ax=panel, extend="both", shrink=0.9)
    bar.set_label("z(activation) − z(gradient)")
    figure.savefig(path, format="png", metadata={"Software": None})


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    0 done, 1 a file cannot be read or written, or was not closed, 2 the command line is wrong, 130 interrupted.
    """
    parser = argparse.ArgumentParser(prog="python -m pipeline mscan", description="Look into an .mscan file.")
    parser.add_argument("file", type=Path, help="the file")
    parser.add_argument(
        "--delta-sc", type=Path, metavar="OUT", help="write z(activation) - z(gradient): numbers as .csv, else a PNG"
    )
    parser.add_argument("--minus", type=Path, metavar="OTHER", help="subtract that of another .mscan file first")
    wanted = parser.parse_args(words)
    if wanted.minus and not wanted.delta_sc:
        parser.error("--minus needs --delta-sc OUT")
    return exit_code(lambda: _run(wanted))


def _run(wanted: argparse.Namespace) -> None:
    out: Path | None = wanted.delta_sc
    check_output(out)
    for file in filter(None, (wanted.file, wanted.minus)):
        if out and out.exists() and file.exists() and out.samefile(file):
            raise ConfigError(f"{out} is the .mscan file itself", where="command line", do="name another output file")
    scan, *others = (read_mscan(file) for file in (wanted.file, wanted.minus) if file)
    say(summarise(scan))
    if out:
        names, values_P = scan.parameters.names, delta_sc(scan.activation(), scan.gradient())
        for other in others:
            if other.parameters.names != names:
                what = "the scans have different parameters, or in another order"
                raise ContractError(what, where=f"{scan.path}, {other.path}", do="scan both with the same patterns")
            values_P = values_P - delta_sc(other.activation(), other.gradient())
        if out.suffix == ".csv":
            numbers = zip(names, values_P.tolist(), strict=True)
            rows = [f"{name},{'' if math.isnan(value) else value}\n" for name, value in numbers]
            write_text(out, "".join(["parameter,delta_sc\n", *rows]))
        else:
            title = " − ".join(f"ΔSC of {one.header.model}" for one in (scan, *others))
            title += f"\nmean of {len(scan.sequences)} sequences"
            draw_delta_sc(names, values_P, out, title=title)
        sys.stdout.write(f"\n{out}\n")
    sys.stdout.flush()
    if not scan.closed:
        raise ContractError(
            f"{scan.path.name} was not closed: its end is missing, or its writer is still at work",
            where=f"{scan.path}, after {len(scan.sequences):,} sequences; {scan.torn:,} unusable bytes follow",
            do="wait for the writer, copy the file again, or go on scanning into it",
        )
