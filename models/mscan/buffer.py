"""Rows gathered into segments of a fixed size, wherever the rows come from."""

from models.mscan.rows import Rows, join
from models.mscan.segment_file import SegmentFile

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
