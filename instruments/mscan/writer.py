"""Write a scanner's records so that a kill loses at most the unsealed segment; merge several files into one."""

import os
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from fcntl import LOCK_EX, LOCK_NB, flock
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, Self
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from instruments.durable import sync, whole_file
from instruments.errors import ContractError
from instruments.mscan.header import (
    ENCODINGS,
    TOKEN_ARRAYS,
    Header,
    ParameterTable,
    Rows,
    StoredSequence,
    WatchedParameter,
    array_widths,
    join,
    pack_header,
    refused,
)
from instruments.mscan.reader import Mscan, Segment, read_mscan
from instruments.mscan.segments import CLOSING, HEADER, SegmentHeader, pack_payload
from instruments.parameter_scan.targets import ScanRecord

SEGMENT_BYTES = 64 << 20  # as float32


class SegmentFile:
    """A file that collects rows and appends them as segments.

    A segment is sealed after `segment_sequences` sequences, or when it reaches 64 MiB: segments depend on the sequences
    alone, not on how many are appended at a time.
    """

    def __init__(self, path: Path, header: Header, segment_sequences: int, *, append: bool = False) -> None:
        """Create the file, or with `append` continue an existing one.

        Raises:
            ContractError: the file exists; or, with `append`, it is damaged, its header differs from `header` in more
                than date and metadata, or another process is writing it.
        """
        assert segment_sequences > 0
        self.path, self.header, self.next_number = path, header, 0
        self._most = segment_sequences
        self._segments = self._sequences = self._tokens = 0  # sealed so far
        self._file = self._reopen() if append and path.exists() else self._create()
        self._end = self._file.tell()
        self._waiting: list[Rows] = []
        self._count = self._nbytes = 0

    def _create(self) -> BinaryIO:
        """Create the file with its complete header; a kill leaves no incomplete file."""
        unfinished = self.path.with_name(f".{self.path.name}.{os.getpid()}.new")
        file = unfinished.open("w+b")
        try:
            _lock(file, self.path)
            file.write(pack_header(self.header))
            _sync(file)
            os.link(unfinished, self.path)  # unlike a rename, it replaces no file
            sync(self.path.parent)
        except BaseException as error:
            file.close()
            if not isinstance(error, FileExistsError):
                raise
            do = "append=True to go on with it, or another name"
            raise refused(self.path, f"{self.path.name} is there already", do) from None
        finally:
            unfinished.unlink()
        return file

    def _reopen(self) -> BinaryIO:
        """Open an existing file; a torn tail is cut off, with a warning that gives its length."""
        file = self.path.open("r+b")
        try:
            _lock(file, self.path)
            found = read_mscan(self.path, verify=False)
            if differences := found.header.differences(self.header):
                what = f"{self.path.name} was written with another {', '.join(differences)}"
                raise refused(self.path, what, "write to another file, or scan with the settings of this one")
            if found.torn:
                warnings.warn(f"{self.path}: cut off a torn tail of {found.torn} bytes", stacklevel=4)
            file.truncate(found.end)
            file.seek(found.end)
        except BaseException:
            file.close()
            raise
        self.header = found.header
        self.next_number = 1 + max((sequence.number for sequence in found.sequences), default=-1)
        self._segments, self._sequences = len(found.segments), len(found.sequences)
        self._tokens = sum(sequence.tokens for sequence in found.sequences)
        return file

    def append(self, rows: Rows) -> None:
        """Take over `rows`, which must not change afterwards; full segments are sealed."""
        start = 0
        for row, nbytes in enumerate(rows.nbytes(), 1):
            self._count += 1
            self._nbytes += nbytes
            if self._count == self._most or self._nbytes >= SEGMENT_BYTES:
                self._waiting.append(rows.cut(start, row))
                self.seal()
                start = row
        if start < len(rows.sequences):
            self._waiting.append(rows.cut(start, len(rows.sequences)))

    def seal(self) -> None:
        """Write all rows added so far to the disk as one segment; after an error it can be called again."""
        if self._waiting:
            self._write(join(self._waiting))
        self._waiting, self._count, self._nbytes = [], 0, 0

    def _write(self, rows: Rows) -> None:
        """Write the payload, and the segment's header once the payload is on the disk."""
        start = self._end
        self._file.seek(start)
        self._file.truncate()  # remove the rest of a failed write
        self._file.write(bytes(HEADER.size))
        length = checksum = 0
        for part in pack_payload(self.header, rows):
            self._file.write(part)
            checksum = crc32(part, checksum)
            length += len(part)
        _sync(self._file)
        tokens = sum(sequence.tokens for sequence in rows.sequences)
        segment = SegmentHeader(start, self._segments, len(rows.sequences), tokens, length, checksum)
        self._file.seek(start)
        self._file.write(segment.pack())
        _sync(self._file)
        self._end = segment.end
        self._segments += 1
        self._sequences += segment.sequences
        self._tokens += tokens

    def close(self) -> None:
        """Seal the remaining rows, write the closing header, close the file and release its lock."""
        try:
            self.seal()
            closing = SegmentHeader(self._end, self._segments, self._sequences, self._tokens, 0, 0, CLOSING)
            self._file.seek(self._end)
            self._file.truncate()
            self._file.write(closing.pack())
            _sync(self._file)
        finally:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        """Close; after an error the added rows are sealed, and the file gets no closing header."""
        if kind is None:
            self.close()
            return
        try:
            self.seal()
        finally:
            self._file.close()


def _lock(file: BinaryIO, path: Path) -> None:
    """Lock the file until it is closed; the kernel releases the lock of a killed writer."""
    try:
        flock(file, LOCK_EX | LOCK_NB)
    except BlockingIOError:
        what = f"another process is writing {path.name}"
        raise refused(path, what, "wait for it, or write to another file") from None


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


class MscanWriter(SegmentFile):
    """An .mscan file of a scanner's records, closed by `with`. Records are safe once their segment is sealed."""

    def __init__(
        self,
        path: Path,
        parameters: Sequence[WatchedParameter],
        *,
        model: str,
        block_width: int,
        encoding: str = "log16",
        segment_sequences: int = 1024,
        per_token: bool = False,
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
            segment_sequences: sequences per segment; a segment is also sealed at 64 MiB.
            per_token: also store the values per token.
            metadata: any JSON values.
            created: ISO 8601; default now.
            append: continue an existing file; a torn tail is cut off, with a warning.

        Raises:
            ContractError: as in `SegmentFile`, or an unknown encoding.
        """
        if encoding not in ENCODINGS:
            raise refused(path, f"encoding={encoding} is none of {', '.join(ENCODINGS)}", "encoding=log16")
        now = datetime.now(UTC).isoformat(timespec="seconds")
        table = ParameterTable.of(parameters, block_width)
        header = Header(model, created or now, table, encoding, per_token, dict(metadata or {}))
        super().__init__(path, header, segment_sequences, append=append)

    def add(self, record: ScanRecord, numbers: Sequence[int] | None = None) -> None:
        """Add the sequences of a record; full segments are sealed.

        `numbers` are the sequences' numbers in the whole scan; by default they continue after the last.

        Raises:
            ContractError: shapes that do not fit the parameter table, or a negative or infinite value.
        """
        start = self.next_number
        numbers = range(start, start + len(record.sequences)) if numbers is None else numbers
        rows = _rows_of(self.header, record, numbers)
        _check(self, rows)
        self.append(rows)
        self.next_number = max(start, *(number + 1 for number in numbers)) if len(numbers) else start


# Array → field of the record.
_FIELDS = {
    "activation": "activation_BP", "gradient": "gradient_BP", "in_activation": "in_activation_BI",
    "in_gradient": "in_gradient_BI", "out_gradient": "out_gradient_BO",
}  # fmt: skip


def _rows_of(header: Header, record: ScanRecord, numbers: Sequence[int]) -> Rows:
    """Copy the record, because the scanner may reuse its buffers."""
    assert len(numbers) == len(record.sequences), "one number per sequence"
    pairs = zip(numbers, record.sequences, strict=True)
    sequences = tuple(StoredSequence(int(number), **vars(sequence)) for number, sequence in pairs)
    arrays = {name: np.array(getattr(record, of).detach().numpy(), np.float32) for name, of in _FIELDS.items()}
    if header.per_token:
        if record.token_activation is None or record.token_gradient is None:
            raise ContractError(
                "the record holds no values per token", where="MscanWriter(per_token=True)", do="per_token=False"
            )
        parameters = len(header.table.entries)
        arrays["token_activation"] = _stack(record.token_activation, parameters)
        arrays["token_gradient"] = _stack(record.token_gradient, parameters)
    return Rows(sequences, arrays)


def _stack(values: Sequence[Tensor], columns: int) -> NDArray[np.float32]:
    return np.concatenate([np.empty((0, columns), np.float32), *(value.detach().numpy() for value in values)])


def _check(file: SegmentFile, rows: Rows) -> None:
    """Raise ContractError if an array's shape does not fit the tables, or a value is negative or infinite."""
    tokens = sum(sequence.tokens for sequence in rows.sequences)
    for name, columns in array_widths(file.header).items():
        values = rows.arrays[name]
        expected = (tokens if name in TOKEN_ARRAYS else len(rows.sequences), columns)
        if values.shape != expected:
            do = "give the writer the parameters and the block width of the scanner that made the record"
            raise refused(file.path, f"{name} is {list(values.shape)}; the tables say {list(expected)}", do)
        if np.fmin.reduce(values, axis=None, initial=0) < 0 or np.fmax.reduce(values, axis=None, initial=0) == np.inf:
            names = ", ".join(sequence.name for sequence in rows.sequences)
            raise ContractError(
                f"{name} holds a negative or infinite value, which is not a norm",
                where=f"{file.path}, sequences {names}",
                do="scan in a wider number format, such as model.dtype=float32",
            )


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
    """Write all sequences of `parts`, or those in `numbers`, to `out`, each once, ordered by number.

    The file depends only on the sequences, not on their distribution over parts and segments: with f32 parts it is
    always identical to the byte. A number in several parts is taken from the first. Torn tails are skipped. Other
    arguments as in `MscanWriter`.

    Raises:
        ContractError: no parts, parts of different scans, a damaged part, a number that no part has, or `out` exists.
    """
    files = _open_parts(parts)
    found: dict[int, _Found] = {}
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
    files: list[Mscan] = []
    for path in parts:
        part = read_mscan(path)
        differences = part.header.differences(replace(files[0].header, encoding=part.header.encoding)) if files else []
        if differences:
            what = f"{path.name} and {files[0].path.name} differ in {', '.join(differences)}"
            raise refused(path, what, "merge parts of one scan only")
        files.append(part)
    if not files:
        raise ContractError("no .mscan file to merge", where="merge_mscan", do="name at least one part")
    return files


def _gather(places: Sequence[_Found], most: int = 64) -> Iterator[Rows]:
    """Rows in the given order; consecutive ones of one segment are read together."""
    for _segment, run in groupby(places, key=lambda place: id(place[0])):
        neighbours = list(run)
        for start in range(0, len(neighbours), most):
            some = neighbours[start : start + most]
            yield some[0][0].rows(np.array([row for _, row in some]))
