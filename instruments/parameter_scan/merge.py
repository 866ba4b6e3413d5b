"""Merge several .mscan files of one scan into one."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np

from instruments.errors import ContractError
from instruments.files import whole_file
from instruments.parameter_scan.header import Rows, refused
from instruments.parameter_scan.reader import Mscan, Segment, read_mscan
from instruments.parameter_scan.writer import SegmentFile


def merge_mscan(
    parts: Sequence[Path],
    out: Path,
    *,
    created: str,
    numbers: Collection[int] | None = None,
    encoding: str = "log16",
    segment_sequences: int = 1024,
) -> None:
    """Write all sequences of `parts`, or those in `numbers`, to `out`, each once, ordered by number.

    The file depends only on the sequences, not on their distribution over parts and segments: with f32 parts it is
    always identical to the byte. A number in several parts is taken from the first. Torn tails are skipped. Other
    arguments as in `MscanWriter`. Raises ContractError: no parts, parts of different scans, a damaged part, a number
    that no part has, or `out` exists.
    """
    files = _open_parts(parts)
    found: dict[int, tuple[Segment, int]] = {}
    for file in files:
        for segment in file.segments:
            for row, sequence in enumerate(segment.sequences):
                found.setdefault(sequence.number, (segment, row))
    wanted = sorted(found if numbers is None else numbers)
    if missing := [number for number in wanted if number not in found]:
        named = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
        what = f"{len(missing)} of {len(wanted)} sequences are in no part: number {named}"
        raise refused(out, what, "scan them again, or merge with the parts that hold them")
    header = replace(files[0].header, created=created, encoding=encoding)
    if out.exists():
        raise refused(out, f"{out.name} is there already", "remove it, or choose another name")
    with whole_file(out) as unfinished:
        unfinished.unlink(missing_ok=True)  # left by a killed merge
        with SegmentFile(unfinished, header, segment_sequences) as merged:
            for rows in _gather([found[number] for number in wanted]):
                merged.append(rows)


def _open_parts(parts: Sequence[Path]) -> list[Mscan]:
    if not parts:
        raise ContractError("no .mscan file to merge", where="merge_mscan", do="name at least one part")
    first, *others = files = [read_mscan(path) for path in parts]
    for part in others:
        if differences := part.header.differences(replace(first.header, encoding=part.header.encoding)):
            what = f"{part.path.name} and {first.path.name} differ in {', '.join(differences)}"
            raise refused(part.path, what, "merge parts of one scan only")
    return files


def _gather(places: Sequence[tuple[Segment, int]]) -> Iterator[Rows]:
    """Sequences in the given order; consecutive ones of one segment are read together, at most 64 at a time."""
    for segment, run in groupby(places, key=itemgetter(0)):
        rows = [row for _segment, row in run]
        for start in range(0, len(rows), 64):
            yield segment.rows(np.array(rows[start : start + 64]))
