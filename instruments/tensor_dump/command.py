"""`python -m pipeline dump show|compare|export FOLDER ...`: inspect, compare and export tensor dumps."""

import argparse
import math
import re
import sys
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from instruments.dtypes import SIZES
from instruments.errors import ConfigError, align, exit_code, progress, say, some
from instruments.tensor_dump.index import STORED, Source, TensorRecord
from instruments.tensor_dump.reader import DumpReader

if TYPE_CHECKING:
    from torch import Tensor

COLUMNS = ("module", "tensor", "records", "shape", "type", "range", "largest std", "suspicious")


def summarise(reader: DumpReader) -> str:
    """Facts, a table row per kind of module and tensor, and problems."""
    groups: dict[tuple[str, str], list[TensorRecord]] = {}
    for record in reader.records:
        kind = re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)|(?<=\.)\d+$", "*", record.source.module)
        groups.setdefault((kind, record.source.tensor), []).append(record)
    table = align([COLUMNS, *((*group, *_row(records)) for group, records in groups.items())])
    facts = align(facts_of(reader))
    complaints = "".join(f"{line}\n" for line in complaints_of(reader))
    return "\n".join([*facts, "", *table, ""]) + (f"\n{complaints}" if complaints else "")


def complaints_of(reader: DumpReader) -> Iterator[str]:
    """Missing files, incomplete lines, killed processes, and problems in the manifests."""
    if missing := reader.missing_files:
        yield f"{len(missing)} files that the index names are missing: {some(missing, 3)}"
    if reader.torn:
        yield f"{reader.torn} bytes at the end of an index were left by a killed process, and are not read"
    manifests = reader.manifests()
    if killed := [str(rank) for rank in reader.ranks if rank not in manifests]:
        yield f"ranks {some(killed, 3)} did not finish: listed tensors are complete, later ones are missing"
    for rank, manifest in sorted(manifests.items()):
        yield from (f"rank {rank}: {complaint}" for complaint in manifest.complaints())


def facts_of(reader: DumpReader) -> Iterator[tuple[str, str]]:
    """Number of records, modules, processes and steps, and the size of the tensors."""
    sources = [record.source for record in reader.records]
    steps = sorted({source.step for source in sources})
    stored = {(record.file, record.key): record for record in reader.records if record.status == STORED}
    size = sum(prod(record.shape) * SIZES.get(record.dtype, 4) for record in stored.values())
    labels = {record.label for record in reader.records if record.label is not None}
    yield "folder", str(reader.folder)
    yield "records", f"{len(sources):,}, {len({source.module for source in sources})} modules"
    yield "processes", ", ".join(map(str, reader.ranks))
    yield "steps", f"{len(steps)}, {steps[0]} to {steps[-1]}" if steps else "0"
    yield "tensors", f"{len(stored):,} of {size / 2**20:,.1f} MiB; shared tensors count once"
    if labels:
        real = sorted({record.quant_type for record in reader.records})
        yield "label", f"{', '.join(sorted(labels))}; really {', '.join(real)}"


def _row(records: Sequence[TensorRecord]) -> tuple[str, ...]:
    found = [record.statistics for record in records if record.statistics is not None]
    lows = [one.minimum for one in found if one.minimum is not None]
    highs = [one.maximum for one in found if one.maximum is not None]
    deviations = [one.std for one in found if one.std is not None]
    zeros, nonfinite = sum(one.all_zero for one in found), sum(one.nonfinite > 0 for one in found)
    notes = [f"{zeros} all zero"] * (zeros > 0) + [f"{nonfinite} not finite"] * (nonfinite > 0)
    shapes = sorted({"×".join(map(str, record.shape)) for record in records})
    types = sorted({record.quant_type for record in records})
    return (
        f"{len(records):,}", some(shapes, 3, " "), some(types, 3),
        f"{min(lows):.3g} … {max(highs):.3g}" if lows else "–", f"{max(deviations):.3g}" if deviations else "–",
        ", ".join(notes),
    )  # fmt: skip


Difference = tuple[Source, float, float, float]


def find_difference(source: Source, a: "Tensor", b: "Tensor") -> Difference | None:
    """How `b` differs from `a`: relative L2, largest distance, cosine; None if both have equal bytes or no values.

    NaN where shapes differ or a value is not finite.
    """
    import torch  # noqa: PLC0415 - slow to import

    from instruments.precision.comparison import measure_distance  # noqa: PLC0415

    if a.shape == b.shape:
        bits = [one.contiguous().view(-1).view(torch.uint8) for one in (a, b)]  # NaN equals itself; 0 differs from −0
        if not a.numel() or (a.dtype == b.dtype and torch.equal(*bits)):
            return None
        found = measure_distance(a, b)
        if a.dtype != b.dtype and not found.max_abs and not found.nonfinite:  # the same values in another format
            return None
        if not found.nonfinite and not found.reference_nonfinite:
            return source, found.normalised_l2, found.max_abs, found.cosine
    return source, math.nan, math.nan, math.nan


_WORST = 10


def compare_folders(first: Path, second: Path, tolerance: float) -> tuple[bool, str]:
    """Whether all common tensors agree within `tolerance`, and a text with the first and the largest differences.

    Tensors of the same process, step, microbatch, call, module and name are compared by relative L2 distance; with
    tolerance 0 any bit counts. Raises ConfigError: the dumps have no tensor in common.
    """
    with DumpReader(first) as ours, DumpReader(second) as theirs:
        mine, others = (
            {(record.rank, record.source): record for record in reader.select(status=STORED)}
            for reader in (ours, theirs)
        )
        common = [key for key in mine if key in others]
        if not common:
            what = "the two dumps have no tensor in common"
            do = "dump the same modules and steps of the same model twice"
            raise ConfigError(what, where=f"{first}, {second}", do=do)
        keys = progress(common, "compare")
        found = [find_difference(key[1], ours.load(mine[key]), theirs.load(others[key])) for key in keys]
    differences = [one for one in found if one and not (tolerance and one[1] <= tolerance)]
    text = f"{len(common):,} tensors compared, {len(differences):,} differ"
    text += f" by more than {tolerance:g}\n" if tolerance else "\n"
    only_first, only_second = len(mine) - len(common), len(others) - len(common)
    if only_first or only_second:
        text += f"only in {first}: {only_first:,}; only in {second}: {only_second:,}\n"
    if differences:
        worst = sorted((one for one in differences if not math.isnan(one[1])), key=lambda one: -one[1])
        lost = [one for one in differences if math.isnan(one[1])]
        text += f"\nfirst divergence, in the order of capture\n{_table(differences[:1])}\n"
        text += f"\nlargest relative distances\n{_table(worst[:_WORST])}\n" if worst else ""
        text += f"\n{len(lost)} with NaN, inf or another shape\n{_table(lost[:_WORST])}\n" if lost else ""
    return not differences, text


def _table(differences: Sequence[Difference]) -> str:
    rows = [
        (source.module, source.tensor, str(source.step), f"{relative:.3g}", f"{largest:.3g}", f"{cosine:.9f}")
        for source, relative, largest, cosine in differences
    ]
    return "\n".join(align([("module", "tensor", "step", "relative L2", "largest", "cosine"), *rows]))


DIFFERENT = 3


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    0 done, 1 a dump cannot be read, 2 the command line is wrong, 3 the compared dumps differ,
    130 interrupted.
    """
    parser = argparse.ArgumentParser(prog="python -m pipeline dump", description="Look into tensor dumps.")
    commands = parser.add_subparsers(required=True, metavar="show|compare|export")
    show = commands.add_parser("show", help="a table by module and tensor; what is missing or suspicious")
    show.add_argument("folder", type=Path, help="folder of the dump")
    show.set_defaults(act=_show)
    compare = commands.add_parser("compare", help="where two dumps of the same model differ")
    compare.add_argument("first", type=Path)
    compare.add_argument("second", type=Path)
    compare.add_argument(
        "--tolerance", type=float, default=0.0, help="largest accepted relative distance (default 0: any bit counts)"
    )
    compare.set_defaults(act=_compare)
    export = commands.add_parser("export", help="one .pt file for each tensor")
    export.add_argument("folder", type=Path)
    export.add_argument("out", type=Path)
    export.set_defaults(act=_export)
    wanted = parser.parse_args(words)
    return exit_code(lambda: wanted.act(wanted))


def _show(wanted: argparse.Namespace) -> int:
    with DumpReader(wanted.folder) as reader:
        say(summarise(reader))
    return 0


def _compare(wanted: argparse.Namespace) -> int:
    equal, text = compare_folders(wanted.first, wanted.second, wanted.tolerance)
    say(text)
    return 0 if equal else DIFFERENT


def _export(wanted: argparse.Namespace) -> int:
    from instruments.tensor_dump.tensor_files import export_pt  # noqa: PLC0415 - loads torch

    with DumpReader(wanted.folder) as reader:
        sys.stdout.write(f"{wanted.out}: {export_pt(reader, wanted.out)} files\n")
    return 0
