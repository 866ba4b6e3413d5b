"""Several files of one scan into one: workers' parts, and what interrupted runs left."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import numpy as np

from instruments.durable import whole_file
from instruments.errors import ContractError
from instruments.mscan.header import Rows
from instruments.mscan.reader import Mscan, Segment, read_mscan
from instruments.mscan.writer import SegmentFile

_Found = tuple[Segment, int]


def merge_mscan(
    parts: Sequence[Path],
    out: Path,
    *,
    created: str,
    numbers: Collection[int] | None = None,
    encoding: str = "log16",
    segment_sequences: int = 1024,
) -> None:
    """Write all sequences of `parts` to `out` in the order of their numbers, each once.

    The file depends on the sequences alone, not on how they were spread over parts and segments: with f32 parts it is
    equal to the byte however often the scan was interrupted. A number in several parts is taken from the first. A
    part's torn tail is left out.

    Args:
        parts: at least one file, all with the same parameters.
        out: the file to write; it appears when it is complete.
        created: ISO 8601.
        numbers: the sequences that belong into the file; all of them, unless given.
        encoding: log16 or f32.
        segment_sequences: sequences a segment.

    Raises:
        ContractError: parts that do not belong together, a damaged part, a number that no part has, or `out` exists.
    """
    files = _open_parts(parts)
    found = _find(files)
    wanted = sorted(found if numbers is None else numbers)
    _check_complete(found, wanted, out)
    header = replace(files[0].header, created=created, encoding=encoding)
    if out.exists():
        raise ContractError(f"{out.name} is there already", where=str(out), do="remove it, or choose another name")
    with whole_file(out) as unfinished:
        unfinished.unlink(missing_ok=True)  # of a merge that was killed
        with SegmentFile(unfinished, header, segment_sequences) as file:
            for rows in _gather([found[number] for number in wanted]):
                file.append(rows)


def _open_parts(parts: Sequence[Path]) -> list[Mscan]:
    files: list[Mscan] = []
    for path in parts:
        part = read_mscan(path)
        differences = part.header.differences(replace(files[0].header, encoding=part.header.encoding)) if files else []
        if differences:
            raise ContractError(
                f"{path.name} and {files[0].path.name} differ in {', '.join(differences)}",
                where=str(path),
                do="merge parts of one scan only",
            )
        files.append(part)
    if not files:
        raise ContractError("no .mscan file to merge", where="merge_mscan", do="name at least one part")
    return files


def _find(files: Sequence[Mscan]) -> dict[int, _Found]:
    """Place of each number's rows; the first part that has them counts."""
    found: dict[int, _Found] = {}
    for file in files:
        for segment in file.segments:
            for row, sequence in enumerate(segment.sequences):
                found.setdefault(sequence.number, (segment, row))
    return found


def _check_complete(found: Collection[int], wanted: Sequence[int], out: Path) -> None:
    missing = [number for number in wanted if number not in found]
    if missing:
        named = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
        raise ContractError(
            f"{len(missing)} of {len(wanted)} sequences are in no part: number {named}",
            where=str(out),
            do="scan them again, or merge with the parts that hold them",
        )


def _gather(places: Sequence[_Found], most: int = 64) -> Iterator[Rows]:
    """Rows in the given order, neighbours of one segment together."""
    for _segment, run in groupby(places, key=lambda place: id(place[0])):
        neighbours = list(run)
        for start in range(0, len(neighbours), most):
            some = neighbours[start : start + most]
            yield some[0][0].rows(np.array([row for _, row in some]))
