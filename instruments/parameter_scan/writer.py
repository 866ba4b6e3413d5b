"""Write a scanner's records so that a kill loses at most the unsealed segment."""

import os
import warnings
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from typing import Any, BinaryIO, Self
from zlib import crc32

import numpy as np

from instruments.errors import ContractError
from instruments.files import sync
from instruments.parameter_scan.header import (
    ENCODINGS,
    SEQUENCE_ARRAYS,
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
from instruments.parameter_scan.reader import read_mscan
from instruments.parameter_scan.segments import CLOSING, HEADER, SegmentHeader, pack_payload
from instruments.parameter_scan.targets import ScanRecord

SEGMENT_BYTES = 64 << 20  # as float32


class SegmentFile:
    """A file that collects rows and appends them as segments, sealed at a number of sequences or at 64 MiB.

    Segments depend on the sequences alone, not on how many are appended at a time.
    """

    def __init__(self, path: Path, header: Header, segment_sequences: int, *, append: bool = False) -> None:
        """Create the file, or with `append` continue an existing one.

        Raises ContractError: the file exists; or, with `append`, it is damaged, its header differs from `header` in
        more than date and metadata, or another process is writing it.
        """
        assert segment_sequences > 0
        self.path, self.header, self.next_number = path, header, 0
        self._most = segment_sequences
        # `_closing` would close the file after the sealed segments; its offset is their end.
        self._file, self._closing = self._reopen() if append and path.exists() else self._create()
        self._waiting: list[Rows] = []
        self._count = self._nbytes = 0  # of the waiting rows

    def _create(self) -> tuple[BinaryIO, SegmentHeader]:
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
        return file, SegmentHeader(file.tell(), 0, 0, 0, 0, 0, CLOSING)

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
                warnings.warn(f"{self.path}: cut off a torn tail of {found.torn} bytes", stacklevel=4)
            file.truncate(found.end)
        except BaseException:
            file.close()
            raise
        self.header = found.header
        self.next_number = 1 + max((sequence.number for sequence in found.sequences), default=-1)
        tokens = sum(sequence.tokens for sequence in found.sequences)
        return file, SegmentHeader(found.end, len(found.segments), len(found.sequences), tokens, 0, 0, CLOSING)

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
        self._cut()
        self._file.write(bytes(HEADER.size))
        length = checksum = 0
        for part in pack_payload(self.header, rows):
            self._file.write(part)
            checksum = crc32(part, checksum)
            length += len(part)
        _sync(self._file)
        last, sequences, tokens = self._closing, len(rows.sequences), sum(one.tokens for one in rows.sequences)
        segment = SegmentHeader(last.offset, last.index, sequences, tokens, length, checksum)
        self._file.seek(segment.offset)
        self._file.write(segment.pack())
        _sync(self._file)
        counts = last.index + 1, last.sequences + sequences, last.tokens + tokens
        self._closing = SegmentHeader(segment.end, *counts, 0, 0, CLOSING)

    def _cut(self) -> None:
        """Remove everything after the sealed segments, such as the rest of a failed write."""
        self._file.seek(self._closing.offset)
        self._file.truncate()

    def close(self) -> None:
        """Seal the remaining rows, write the closing header, close the file and release its lock."""
        try:
            self.seal()
            self._cut()
            self._file.write(self._closing.pack())
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
        path: Path | str,
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
        path = Path(path)
        if encoding not in ENCODINGS:
            raise refused(path, f"encoding={encoding} is none of {', '.join(ENCODINGS)}", "encoding=log16")
        now = datetime.now(UTC).isoformat(timespec="seconds")
        table = ParameterTable.of(parameters, block_width)
        header = Header(model, created or now, table, encoding, per_token, dict(metadata or {}))
        super().__init__(path, header, segment_sequences, append=append)

    def add(self, record: ScanRecord, numbers: Sequence[int] | None = None) -> None:
        """Add the sequences of a record; full segments are sealed.

        `numbers` are the sequences' numbers in the whole scan; by default they continue after the last.
        Raises ContractError: shapes that do not fit the parameter table, or a negative or infinite value.
        """
        start = self.next_number
        numbers = range(start, start + len(record.sequences)) if numbers is None else numbers
        rows = _rows_of(self.header, record, numbers)
        _check(self, rows)
        self.append(rows)
        self.next_number = max([start, *(number + 1 for number in numbers)])


def _rows_of(header: Header, record: ScanRecord, numbers: Sequence[int]) -> Rows:
    """Copy the record, because the scanner may reuse its buffers."""
    pairs = zip(numbers, record.sequences, strict=True)
    sequences = tuple(StoredSequence(int(number), **vars(sequence)) for number, sequence in pairs)
    norms = (
        record.activation_BP, record.gradient_BP, record.in_activation_BI, record.in_gradient_BI, record.out_gradient_BO
    )  # fmt: skip
    named = zip(SEQUENCE_ARRAYS, norms, strict=True)
    arrays = {name: np.array(values.detach().numpy(), np.float32) for name, values in named}
    tokens = zip(TOKEN_ARRAYS, (record.token_activation, record.token_gradient), strict=True)
    for name, by_sequence in tokens if header.per_token else ():
        if by_sequence is None:
            raise ContractError(
                "the record holds no values per token", where="MscanWriter(per_token=True)", do="per_token=False"
            )
        none = np.empty((0, len(header.table.entries)), np.float32)
        arrays[name] = np.concatenate([none, *(values.detach().numpy() for values in by_sequence)])
    return Rows(sequences, arrays)


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
            what = f"{name} holds a negative or infinite value, which is not a norm"
            do = "scan in a wider number format, such as model.dtype=float32"
            raise ContractError(what, where=f"{file.path}, sequences {names}", do=do)
