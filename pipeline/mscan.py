"""`python -m pipeline.mscan FILE`: what is in an .mscan file, as a table, as Parquet and as a picture."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from models.errors import ConfigError, ContractError
from models.mscan.delta_sc import delta_sc, grid_by_layer
from models.mscan.reader import Mscan, read_mscan
from models.mscan.version1 import MscanVersion1
from pipeline.exit_code import exit_code
from pipeline.mscan_summary import summarise, summarise_version1
from pipeline.output_file import check_output


def main(words: Sequence[str] | None = None) -> int:
    """Do what the command line says; returns the exit code.

    0 done, 1 a file cannot be read or written, 2 the command line is wrong, 130 interrupted.
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
    sys.stdout.write(summarise(scan, sequence))
    if wanted.parquet:
        sys.stdout.write(f"\n{wanted.parquet}: {_export(scan, sequence, wanted.parquet):,} rows\n")
    if wanted.delta_sc:
        _draw(scan, sequence, wanted.delta_sc)
        sys.stdout.write(f"\n{wanted.delta_sc}\n")
    sys.stdout.flush()


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
    sys.stdout.write(summarise_version1(scan))


def _sequence(scan: Mscan, wanted: str) -> int:
    """Number of the sequence of that name, or else of that number."""
    named = [sequence.number for sequence in scan.sequences if sequence.name == wanted]
    if named:
        return named[0]
    digits = wanted.isascii() and wanted.isdecimal()
    return scan.select(int(wanted) if digits else wanted).sequences[0].number


def _export(scan: Mscan, sequence: int | None, out: Path) -> int:
    try:
        from pipeline.mscan_parquet import export_parquet  # noqa: PLC0415 - an optional extra
    except ModuleNotFoundError as error:
        raise ConfigError(
            "--parquet needs pyarrow, which is not installed", where="command line", do="pip install -e '.[parquet]'"
        ) from error
    return export_parquet(scan, out, sequence)


def _draw(scan: Mscan, sequence: int | None, out: Path) -> None:
    from stages.plots.delta_sc import draw_delta_sc  # noqa: PLC0415 - matplotlib takes a second to load

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
