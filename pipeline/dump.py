"""`python -m pipeline.dump show|compare|export FOLDER ...`: what is in a tensor dump."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from models.dump.listing import Listing, list_dump
from models.dump.records import STORED, TensorRecord
from models.errors import ConfigError
from pipeline.dump_summary import summarise
from pipeline.exit_code import exit_code
from pipeline.output_file import check_output

DIFFERENT = 3
MOST_PANELS = 12


def main(words: Sequence[str] | None = None) -> int:
    """Do what the command line says; returns the exit code.

    0 done, 1 a dump cannot be read or a picture not be written, 2 the command line is wrong, 3 the dumps compared are
    different, 130 interrupted.
    """
    wanted = _parser().parse_args(words)
    return exit_code(lambda: wanted.act(wanted))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pipeline.dump", description="Look into tensor dumps.")
    commands = parser.add_subparsers(required=True, metavar="show|compare|export")
    show = commands.add_parser("show", help="a table by module and tensor; what is missing or suspicious; pictures")
    show.add_argument("folder", type=Path, help="of the dump")
    show.add_argument("--module", default="*", metavar="GLOB", help="only these modules")
    show.add_argument("--tensor", default="*", metavar="GLOB", help="only input, weight, grad_output, query ...")
    show.add_argument("--step", type=int, help="only this step")
    show.add_argument("--rounded", action="store_true", help="the copies rounded into another number format")
    show.add_argument("--list", action="store_true", help="one line a tensor, by name")
    show.add_argument("--histogram", type=Path, metavar="OUT", help="draw how the values are spread, as a PNG")
    show.add_argument("--channels", type=Path, metavar="OUT", help="draw the range of every channel, as a PNG")
    show.set_defaults(act=_show)
    compare = commands.add_parser("compare", help="two dumps of the same model: where they part")
    compare.add_argument("first", type=Path)
    compare.add_argument("second", type=Path)
    compare.add_argument(
        "--tolerance", type=float, default=0.0, help="relative distance that counts (default: any bit)"
    )
    compare.set_defaults(act=_compare)
    export = commands.add_parser("export", help="one .pt file for each tensor")
    export.add_argument("folder", type=Path)
    export.add_argument("out", type=Path)
    export.set_defaults(act=_export)
    return parser


def _show(wanted: argparse.Namespace) -> int:
    for out in filter(None, (wanted.histogram, wanted.channels)):
        check_output(out)
    listing = list_dump(wanted.folder)
    step = {} if wanted.step is None else {"step": wanted.step}
    chosen = listing.select(rounded=wanted.rounded, module=wanted.module, tensor=wanted.tensor, **step)
    if not chosen:
        raise ConfigError(
            f"none of {len(listing.records)} records fits",
            where=f"--module {wanted.module} --tensor {wanted.tensor} --step {wanted.step}",
            do=f"python -m pipeline.dump show {wanted.folder} --list",
        )
    sys.stdout.write("".join(f"{record.name}\n" for record in chosen) if wanted.list else summarise(listing, chosen))
    for out, kind in ((wanted.histogram, "histograms"), (wanted.channels, "channels")):
        if out:
            _draw(listing, chosen, out, kind)
    sys.stdout.flush()
    return 0


def _draw(listing: Listing, chosen: Sequence[TensorRecord], out: Path, kind: str) -> None:
    from models.dump.reader import DumpReader  # noqa: PLC0415 - the table alone needs neither torch nor matplotlib
    from stages.plots.tensor_values import draw_channels, draw_histograms  # noqa: PLC0415

    # Layers that share an input share the picture.
    stored = [*{(record.file, record.key): record for record in reversed(chosen) if record.status == STORED}.values()][
        ::-1
    ]
    shown = stored[:MOST_PANELS]
    with DumpReader(listing.folder) as reader:
        tensors = [(f"{record.source.module}\n{record.source.tensor}", reader.load(record)) for record in shown]
    if not tensors:
        raise ConfigError("no tensor to draw: only statistics were kept", where=str(out), do="dump with keep=tensors")
    (draw_channels if kind == "channels" else draw_histograms)(tensors, out)
    rest = f", the first {len(shown)} of {len(stored)}: --module, --tensor and --step choose" * (
        len(stored) > len(shown)
    )
    sys.stdout.write(f"\n{out}{rest}\n")


def _compare(wanted: argparse.Namespace) -> int:
    from pipeline.dump_comparison import compare_folders  # noqa: PLC0415 - it reads tensors, with torch

    equal, text = compare_folders(wanted.first, wanted.second, wanted.tolerance)
    sys.stdout.write(text)
    return 0 if equal else DIFFERENT


def _export(wanted: argparse.Namespace) -> int:
    from models.dump.export import export_pt  # noqa: PLC0415
    from models.dump.reader import DumpReader  # noqa: PLC0415

    with DumpReader(wanted.folder) as reader:
        sys.stdout.write(f"{wanted.out}: {export_pt(reader, wanted.out)} files\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
