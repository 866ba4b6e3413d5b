"""`python -m pipeline.mscan FILE`: what is in an .mscan file, as a table, as Parquet and as a picture."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tabulate import tabulate

from instruments.command_line import check_output, exit_code, say
from instruments.errors import ConfigError, ContractError
from instruments.mscan.header import locate
from instruments.mscan.reader import Mscan, MscanVersion1, read_mscan

COLUMNS = ("module", "weights", "blocks in", "blocks out", "activation", "gradient", "not measured", "error up to")


@dataclass
class Range:
    """Extremes of what is measured, and how much is not."""

    low: float = np.inf
    high: float = -np.inf
    values: int = 0
    unmeasured: int = 0

    def include(self, values: NDArray[np.float32]) -> None:
        """Widen the range by some more values."""
        self.low = float(np.fmin.reduce(values, axis=None, initial=self.low))
        self.high = float(np.fmax.reduce(values, axis=None, initial=self.high))
        self.values += values.size
        self.unmeasured += int(np.isnan(values).sum())

    def __str__(self) -> str:
        """As a reader wants it."""
        return f"{self.low:.3g} … {self.high:.3g}" if self.low <= self.high else "–"


def summarise(scan: Mscan, sequence: int | None = None) -> str:
    """The file, and value ranges per kind of module: of all sequences, or of one."""
    header = scan.header
    tokens = sum(one.tokens for one in scan.sequences)
    encoding = {"f32": "f32, lossless", "log16": "log16, 16 bits on each column's own logarithmic scale"}
    facts = [
        ("file", f"{scan.path} (.mscan version {scan.version}, {scan.end:,} bytes)"),
        ("model", header.model),
        ("created", header.created),
        ("parameters", f"{len(header.table.entries):,}, in blocks {header.table.block_width} wide"),
        ("sequences", f"{len(scan.sequences):,} of {tokens:,} tokens in {len(scan.segments)} segments"),
        ("encoding", encoding[header.encoding] + (", with values per token" if header.per_token else "")),
    ]
    facts += [(str(key), str(value)) for key, value in header.metadata.items()]
    if scan.torn:
        facts.append(("torn tail", f"{scan.torn:,} bytes that a killed writer had not sealed; not read"))
    if sequence is not None:
        one = scan.select(sequence).sequences[0]
        facts.append(("sequence", f"number {one.number}, {one.name}, {one.tokens:,} tokens {one.source}".rstrip()))
    table = tabulate(list(_module_rows(scan, sequence)), COLUMNS, tablefmt="simple", disable_numparse=True)
    return f"{tabulate(facts, tablefmt='plain', disable_numparse=True)}\n\n{table}\n"


def summarise_version1(scan: MscanVersion1) -> str:
    """A file of version 1, its codes as what they are."""
    tokens = sum(one.tokens for one in scan.sequences)
    facts = [
        ("file", f"{scan.path} (.mscan version 1)"),
        ("model", scan.model),
        ("created", scan.created),
        ("parameters", f"{len(scan.parameters):,}"),
        ("sequences", f"{len(scan.sequences):,} of {tokens:,} tokens"),
        ("records", f"{len(scan.records):,}, {scan.lost:,} more lost to the file's own header or a cut"),
        ("scale", "not stored: the values below are codes, not norms"),
    ]
    for name in ("activation", "grad_norm"):
        codes = scan.records[name]
        if len(codes):
            facts.append((name, f"codes {codes.min()} … {codes.max()}, {np.mean(codes == 0):.0%} of them 0"))
    return tabulate(facts, tablefmt="plain", disable_numparse=True) + "\n"


def _module_rows(scan: Mscan, sequence: int | None) -> Iterator[tuple[str, ...]]:
    table = scan.parameters
    modules: dict[str, list[int]] = {}
    for column, name in enumerate(table.names):
        modules.setdefault(locate(name)[1], []).append(column)
    ranges = {module: (Range(), Range()) for module in modules}
    for activation, gradient in _values(scan, sequence):
        for module, columns in modules.items():
            ranges[module][0].include(activation[:, columns])
            ranges[module][1].include(gradient[:, columns])
    bound = np.maximum(scan.error_bound("activation"), scan.error_bound("gradient"))
    for module, columns in modules.items():
        activation_range, gradient_range = ranges[module]
        inputs = sum(table.input_columns[c].stop - table.input_columns[c].start for c in columns)
        outputs = sum(table.output_columns[c].stop - table.output_columns[c].start for c in columns)
        missing = activation_range.unmeasured + gradient_range.unmeasured
        share = missing / max(1, activation_range.values + gradient_range.values)
        yield (
            module, f"{len(columns)}", f"{inputs:,}", f"{outputs:,}", str(activation_range), str(gradient_range),
            f"{share:.0%}" if share in {0, 1} else f"{share:.2%}", f"{bound[columns].max():.1e}",
        )  # fmt: skip


def _values(scan: Mscan, sequence: int | None) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """Activation and gradient, a segment at a time."""
    if sequence is not None:
        arrays = scan.select(sequence).arrays
        yield arrays["activation"], arrays["gradient"]
        return
    for segment in scan.segments:
        yield segment.array("activation"), segment.array("gradient")


def main(words: Sequence[str] | None = None) -> int:
    """Do what the command line says; returns the exit code.

    0 done, 1 a file cannot be read or written, or its end is missing, 2 the command line is wrong, 130 interrupted.
    """
    wanted = _parser().parse_args(words)
    return exit_code(lambda: _run(wanted))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pipeline.mscan", description="Look into an .mscan file.")
    parser.add_argument("file", type=Path, help="the file")
    parser.add_argument("--parquet", type=Path, metavar="OUT", help="write all norms as a long table")
    parser.add_argument("--delta-sc", type=Path, metavar="OUT", help="draw z(activation) - z(gradient) as a PNG")
    parser.add_argument("--sequence", metavar="NAME|NUMBER", help="only this sequence")
    return parser


def _run(wanted: argparse.Namespace) -> None:
    for out in filter(None, (wanted.parquet, wanted.delta_sc)):
        _check_writable(out, wanted.file)
    scan = read_mscan(wanted.file)
    if isinstance(scan, MscanVersion1):
        _run_version1(scan, wanted)
        return
    sequence = None if wanted.sequence is None else _sequence(scan, wanted.sequence)
    say(summarise(scan, sequence))
    if wanted.parquet:
        sys.stdout.write(f"\n{wanted.parquet}: {_export(scan, sequence, wanted.parquet):,} rows\n")
    if wanted.delta_sc:
        _draw(scan, sequence, wanted.delta_sc)
        sys.stdout.write(f"\n{wanted.delta_sc}\n")
    sys.stdout.flush()
    if not scan.closed:
        raise ContractError(
            f"{scan.path.name} was not closed: its end is missing, or its writer is still at work",
            where=f"{scan.path}, after {len(scan.sequences):,} sequences; {scan.torn:,} bytes of no use follow",
            do="wait for the writer, copy the file again, or go on scanning into it",
        )


def _run_version1(scan: MscanVersion1, wanted: argparse.Namespace) -> None:
    asked = [flag for flag in ("parquet", "delta_sc", "sequence") if getattr(wanted, flag)]
    if asked:
        flags = ", ".join(f"--{flag.replace('_', '-')}" for flag in asked)
        raise ContractError(
            f"{scan.path.name} is of version 1, which stores no scale: its values are codes and no norms, so {flags} "
            "would show what is not there",
            where=str(scan.path),
            do=f"python -m pipeline.mscan {scan.path}, or scan again",
        )
    say(summarise_version1(scan))


def _sequence(scan: Mscan, wanted: str) -> int:
    """Number of the sequence of that name, or else of that number."""
    named = [sequence.number for sequence in scan.sequences if sequence.name == wanted]
    if named:
        return named[0]
    digits = wanted.isascii() and wanted.isdecimal() and len(wanted) < 19
    return scan.select(int(wanted) if digits else wanted).sequences[0].number


def _export(scan: Mscan, sequence: int | None, out: Path) -> int:
    try:
        from instruments.mscan.parquet import export_parquet  # noqa: PLC0415 - an optional extra
    except ModuleNotFoundError as error:
        raise ConfigError(
            "--parquet needs pyarrow, which is not installed", where="command line", do="pip install -e '.[parquet]'"
        ) from error
    return export_parquet(scan, out, sequence)


def _draw(scan: Mscan, sequence: int | None, out: Path) -> None:
    # matplotlib takes a second to load
    from instruments.mscan.delta_sc import (  # noqa: PLC0415
        delta_sc,
        draw_delta_sc,
        grid_by_layer,
    )

    if sequence is None:
        activation, gradient, what = scan.activation(), scan.gradient(), f"mean of {len(scan.sequences)} sequences"
    else:
        rows = scan.select(sequence)
        activation, gradient, what = rows.arrays["activation"], rows.arrays["gradient"], rows.sequences[0].name
    grid = grid_by_layer(scan.parameters.names, delta_sc(activation, gradient))
    draw_delta_sc(grid, out, title=f"ΔSC of {scan.header.model}\n{what}")


def _check_writable(out: Path, source: Path) -> None:
    """Before anything is computed. Raises ConfigError."""
    check_output(out)
    if out.exists() and source.exists() and out.samefile(source):
        raise ConfigError(f"{out} is the .mscan file itself", where="command line", do="name another output file")


if __name__ == "__main__":
    sys.exit(main())
