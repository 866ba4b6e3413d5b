"""Write a scanner's records so that a kill loses at most the unsealed segment, and merge files of one scan."""

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from typing import Any, BinaryIO, Self
from zlib import crc32

import numpy as np

from instruments.errors import ContractError
from instruments.files import WITHOUT_FLOCK, plain_text, sync, whole_file
from instruments.parameter_scan.file_format import (
    ARRAYS,
    CLOSING,
    ENCODINGS,
    SEGMENT_HEADER,
    Header,
    ParameterTable,
    Row,
    SegmentHeader,
    WatchedParameter,
    pack_payload,
    refused,
)
from instruments.parameter_scan.reader import Mscan, Segment, read_mscan
from instruments.parameter_scan.targets import ScanRecord

logger = logging.getLogger(__name__)

# Limits of a segment; the bytes are those as float32.
SEGMENT_SEQUENCES = 1024
SEGMENT_BYTES = 64 << 20


class MscanWriter:
    """An .mscan file of a scanner's records, closed by `with`. Records are safe once their segment is sealed.

    A segment is sealed at 1,024 sequences or 64 MiB: segments depend on the sequences alone, not on how many are added
    at a time.
    """

    def __init__(
        self,
        path: Path | str,
        parameters: Sequence[WatchedParameter],
        *,
        model: str,
        block_width: int,
        encoding: str = "log16",
        metadata: Mapping[str, Any] | None = None,
        created: str | None = None,
        append: bool = False,
    ) -> None:
        """Create the file, or continue one.

        Args:
            path: output file.
            parameters: the scanner's, in the order of its records' columns.
            model: name of the scanned model.
            block_width: columns or rows of a block.
            encoding: log16 (2 bytes per value, error given in SPECIFICATION.md) or f32 (lossless).
            metadata: any JSON values.
            created: ISO 8601; default now.
            append: continue an existing file; a torn tail is cut off, with a warning.

        Raises:
            ContractError: an unknown encoding; the file exists; or, with `append`, it is damaged, its header differs in
                more than date and metadata, or another process is writing it.
        """
        self.path = Path(path)
        if encoding not in ENCODINGS:
            raise refused(self.path, f"encoding={encoding} is none of {', '.join(ENCODINGS)}", "encoding=log16")
        table = ParameterTable(tuple(replace(one, block_width=block_width) for one in parameters), block_width)
        created = created or datetime.now(UTC).isoformat(timespec="seconds")
        self.header = Header(plain_text(model), created, table, encoding, dict(metadata or {}))
        self.next_number = 0
        # `_closing` would close the file after the sealed segments; its offset is their end.
        self._file, self._closing = self._reopen() if append and self.path.exists() else self._create()
        self._waiting: list[Row] = []
        self._nbytes = 0

    def _create(self) -> tuple[BinaryIO, SegmentHeader]:
        """Create the file with its header; after an error there is none."""
        header = self.header.pack()  # raises for metadata that is no JSON
        try:
            file = self.path.open("x+b")
        except FileExistsError:
            do = "append=True to go on with it, or another name"
            raise refused(self.path, f"{self.path.name} is there already", do) from None
        _lock(file, self.path)
        try:
            file.write(header)
            _sync(file)
        except BaseException:
            self.path.unlink()  # first: closing writes the rest, and fails again
            file.close()
            raise
        sync(self.path.parent)
        return file, SegmentHeader(file.tell(), 0, 0, 0, kind=CLOSING)

    def _reopen(self) -> tuple[BinaryIO, SegmentHeader]:
        """Open an existing file; a torn tail is cut off, with a warning that gives its length."""
        file = self.path.open("r+b")
        try:
            _lock(file, self.path)
            found = read_mscan(self.path, verify=False)
            if differences := found.header.differences(self.header):
                what = f"{self.path.name} was written with another {', '.join(differences)}"
                raise refused(self.path, what, "write to another file, or scan with the settings of this one")
            if found.torn:
                logger.warning("%s: cut off a torn tail of %d bytes", self.path, found.torn)
            file.truncate(found.end)
        except BaseException:
            file.close()
            raise
        self.header = found.header
        self.next_number = 1 + max((sequence.number for sequence in found.sequences), default=-1)
        tokens = sum(sequence.tokens for sequence in found.sequences)
        return file, SegmentHeader(found.end, len(found.segments), len(found.sequences), tokens, kind=CLOSING)

    def add(self, record: ScanRecord, numbers: Sequence[int] | None = None) -> None:
        """Add the sequences of a record; full segments are sealed.

        `numbers` are the sequences' numbers in the whole scan; by default they continue after the last.
        Raises ContractError: shapes that do not fit the parameter table, or a negative or infinite value.
        """
        start = self.next_number
        numbers = range(start, start + len(record.sequences)) if numbers is None else numbers
        for row in self._rows_of(record, numbers):
            self.append(row)
        self.next_number = max([start, *(number + 1 for number in numbers)])

    def _rows_of(self, record: ScanRecord, numbers: Sequence[int]) -> list[Row]:
        """Copy the record, because the scanner may reuse its buffers; and check it."""
        pairs = zip(record.sequences, numbers, strict=True)
        sequences = [
            replace(one, name=plain_text(one.name), source=plain_text(one.source), number=int(number))
            for one, number in pairs
        ]
        _sequences, *norms = vars(record).values()
        arrays = {
            name: np.array(values.detach().numpy(), np.float32) for name, values in zip(ARRAYS, norms, strict=True)
        }
        for name, values in arrays.items():
            expected = (len(sequences), self.header.widths[name])
            if values.shape != expected:
                do = "give the writer the parameters and the block width of the scanner that made the record"
                raise refused(self.path, f"{name} is {list(values.shape)}; the tables say {list(expected)}", do)
            low, high = (extreme.reduce(values, axis=None, initial=0) for extreme in (np.fmin, np.fmax))
            if low < 0 or high == np.inf:
                names = ", ".join(sequence.name for sequence in sequences)
                what = f"{name} holds a negative or infinite value, which is not a norm"
                do = "scan in a wider number format, such as model.dtype=float32"
                raise ContractError(what, where=f"{self.path}, sequences {names}", do=do)
        return [
            (sequence, {name: values[row] for name, values in arrays.items()}) for row, sequence in enumerate(sequences)
        ]

    def append(self, row: Row) -> None:
        """Take over a sequence's norms, which must not change afterwards; full segments are sealed."""
        self._waiting.append(row)
        self._nbytes += sum(values.nbytes for values in row[1].values())
        if len(self._waiting) == SEGMENT_SEQUENCES or self._nbytes >= SEGMENT_BYTES:
            self.seal()

    def seal(self) -> None:
        """Write all rows added so far to the disk as one segment; after an error it can be called again."""
        if self._waiting:
            self._write(self._waiting)
        self._waiting, self._nbytes = [], 0

    def _write(self, rows: Sequence[Row]) -> None:
        """Write the payload, and the segment's header once the payload is on the disk."""
        self._cut()
        self._file.write(bytes(SEGMENT_HEADER.size))
        length = checksum = 0
        for part in pack_payload(self.header, rows):
            self._file.write(part)
            checksum = crc32(part, checksum)
            length += len(part)
        _sync(self._file)
        last, sequences, tokens = self._closing, len(rows), sum(sequence.tokens for sequence, _arrays in rows)
        segment = SegmentHeader(last.offset, last.index, sequences, tokens, length, checksum)
        self._file.seek(segment.offset)
        self._file.write(segment.pack())
        _sync(self._file)
        counts = last.index + 1, last.sequences + sequences, last.tokens + tokens
        self._closing = SegmentHeader(segment.end, *counts, kind=CLOSING)

    def _cut(self) -> None:
        """Remove everything after the sealed segments, such as the rest of a failed write."""
        self._file.seek(self._closing.offset)
        self._file.truncate()

    def close(self, *, whole: bool = True) -> None:
        """Seal the remaining rows, write the closing header of a `whole` file, close it and release its lock."""
        try:
            self.seal()
            if whole:
                self._cut()
                self._file.write(self._closing.pack())
                _sync(self._file)
        finally:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        """Close; after an error the added rows are sealed, and the file gets no closing header."""
        self.close(whole=kind is None)


def _lock(file: BinaryIO, path: Path) -> None:
    """Lock the file until it is closed, if the file system can; the kernel releases the lock of a killed writer."""
    try:
        flock(file, LOCK_EX | LOCK_NB)
    except BlockingIOError:
        what = f"another process is writing {path.name}"
        raise refused(path, what, "wait for it, or write to another file") from None
    except OSError as error:
        if error.errno not in WITHOUT_FLOCK:
            raise


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def merge_mscan(parts: Sequence[Path], out: Path, *, created: str, numbers: Collection[int] | None = None) -> None:
    """Write all sequences of `parts`, or those in `numbers`, to `out`, each once, ordered by number.

    The file depends only on the sequences, not on their distribution over parts and segments: with f32 parts it is
    always identical to the byte. A number in several parts is taken from the first. Torn tails are skipped. `created`
    as in `MscanWriter`. Raises ContractError: no parts, parts of different scans, a damaged part, a number that no part
    has, or `out` exists.
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
    if out.exists():
        raise refused(out, f"{out.name} is there already", "remove it, or choose another name")
    header = files[0].header
    with whole_file(out) as unfinished:
        unfinished.unlink(missing_ok=True)  # left by a killed merge
        with MscanWriter(
            unfinished, header.table.entries, model=header.model, block_width=header.table.block_width,
            metadata=header.metadata, created=created,
        ) as merged:  # fmt: skip
            for segment, row in map(found.__getitem__, wanted):
                merged.append(segment.row(row))


def _open_parts(parts: Sequence[Path]) -> list[Mscan]:
    if not parts:
        raise ContractError("no .mscan file to merge", where="merge_mscan", do="name at least one part")
    first, *others = files = [read_mscan(path) for path in parts]
    for part in others:
        if differences := part.header.differences(replace(first.header, encoding=part.header.encoding)):
            what = f"{part.path.name} and {first.path.name} differ in {', '.join(differences)}"
            raise refused(part.path, what, "merge parts of one scan only")
    return files
