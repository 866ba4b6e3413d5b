"""A file that grows by sealed segments, one writer at a time, whatever kills it."""

import os
import warnings
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from typing import BinaryIO
from zlib import crc32

from instruments.errors import ContractError
from instruments.mscan.header import Header, pack_header
from instruments.mscan.reader import Mscan, read_mscan
from instruments.mscan.rows import Rows, join
from instruments.mscan.segments import HEADER, SegmentHeader, pack_payload
from instruments.mscan.version1 import MscanVersion1


class SegmentFile:
    """An open file with its header, to which `seal` appends."""

    def __init__(self, path: Path, file: BinaryIO, header: Header, *, segments: int = 0, next_number: int = 0) -> None:
        """Take over a file that stands at its end, behind so many segments; `create` and `reopen` make one."""
        self.path = path
        self.header = header
        self.next_number = next_number
        self._file = file
        self._end, self._segments = file.tell(), segments

    @classmethod
    def create(cls, path: Path, header: Header) -> "SegmentFile":
        """Begin a file. A kill leaves no file, or one with a whole header.

        Raises:
            ContractError: there is one already.
        """
        unfinished = path.with_name(f".{path.name}.{os.getpid()}.new")
        file = unfinished.open("w+b")
        try:
            _lock(file, path)
            file.write(pack_header(header))
            _sync(file)
            _name(unfinished, path)
        except BaseException:
            file.close()
            raise
        return cls(path, file, header)

    @classmethod
    def reopen(cls, path: Path, header: Header) -> "SegmentFile":
        """Go on with a file; a torn tail is cut off, with a warning that says how long it was.

        Raises:
            ContractError: of version 1, damaged, or with other parameters than `header`; or another process writes it.
        """
        file = path.open("r+b")
        try:
            _lock(file, path)
            found = read_mscan(path, verify=False)
            if isinstance(found, MscanVersion1):
                raise ContractError(
                    f"{path.name} is of .mscan version 1, which cannot be continued",
                    where=str(path),
                    do="write to another file",
                )
            _check_same(found, header)
            if found.torn:
                warnings.warn(f"{path}: cut off a torn tail of {found.torn} bytes", stacklevel=4)
            file.truncate(found.end)
            file.seek(found.end)
        except BaseException:
            file.close()
            raise
        next_number = 1 + max((sequence.number for sequence in found.sequences), default=-1)
        return cls(path, file, found.header, segments=len(found.segments), next_number=next_number)

    def seal(self, rows: Rows) -> None:
        """Append one segment: first the payload, and once that is on the disk, the header.

        After an error the same rows can be sealed again.
        """
        start = self._end
        self._file.seek(start)
        self._file.truncate()  # what an earlier call left that the disk had no room for
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
        self._end, self._segments = segment.end, self._segments + 1

    def close(self) -> None:
        """Close the file, which lets go of the lock."""
        self._file.close()


def _check_same(found: Mscan, header: Header) -> None:
    differences = found.header.differences(header)
    if differences:
        raise ContractError(
            f"{found.path.name} was written with another {', '.join(differences)}",
            where=str(found.path),
            do="write to another file, or scan with the settings of this one",
        )


def _lock(file: BinaryIO, path: Path) -> None:
    """Held until the file is closed, by the kernel, so that a killed writer leaves no lock."""
    try:
        flock(file, LOCK_EX | LOCK_NB)
    except BlockingIOError:
        raise ContractError(
            f"another process is writing {path.name}", where=str(path), do="wait for it, or write to another file"
        ) from None


def _name(unfinished: Path, path: Path) -> None:
    """Give the file its name, unless there is one of that name."""
    try:
        os.link(unfinished, path)
    except FileExistsError:
        raise ContractError(
            f"{path.name} is there already", where=str(path), do="append=True to go on with it, or another name"
        ) from None
    finally:
        unfinished.unlink()
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


SEGMENT_BYTES = 64 << 20  # as float32


class SegmentBuffer:
    """Seals a segment after `sequences` of them, or after the one that brings it to 64 MiB.

    Where segments end depends on the sequences alone and not on how many come at a time.
    """

    def __init__(self, file: SegmentFile, sequences: int) -> None:
        """Gather for `file`."""
        assert sequences > 0
        self._file, self._most = file, sequences
        self._waiting: list[Rows] = []
        self._count = self._nbytes = 0

    def add(self, rows: Rows) -> None:
        """Take over `rows`, which must not change afterwards."""
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
        """Write what waits, if anything does."""
        if self._waiting:
            self._file.seal(join(self._waiting))
        self._waiting, self._count, self._nbytes = [], 0, 0
