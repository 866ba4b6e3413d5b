"""Which segments of a file are sealed, and what of its end is not."""

import re
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from models.errors import ContractError
from models.mscan.segments import HEADER, MAGIC, SegmentHeader, read_segment_header


@dataclass(frozen=True)
class Sealed:
    """The sealed segments in order; `end` is where they end, `torn` how many bytes of unfinished work follow."""

    segments: tuple[SegmentHeader, ...]
    end: int
    torn: int


def find_segments(path: Path, file: memoryview, start: int) -> Sealed:
    """Walk the segments from `start`; a segment that no sealed one follows is a torn tail.

    A segment's header is written only after its payload has reached the disk, so that a writer that was killed
    leaves no header, and a header whose payload does not match its checksum means damage.

    Raises:
        ContractError: a damaged header among sealed segments.
    """
    segments: list[SegmentHeader] = []
    position = start
    while position < len(file):
        segment = read_segment_header(file, position)
        if segment is None or segment.index != len(segments) or segment.end > len(file):
            _check_nothing_follows(path, file, position, len(segments))
            break
        segments.append(segment)
        position = segment.end
    return Sealed(tuple(segments), position, len(file) - position)


def check_payload(path: Path, file: memoryview, segment: SegmentHeader) -> None:
    """Raise ContractError where a payload is not what was written."""
    if crc32(file[segment.payload : segment.end]) != segment.payload_checksum:
        raise _damaged(path, segment.index, f"its payload, bytes {segment.payload} to {segment.end}")


def _check_nothing_follows(path: Path, file: memoryview, position: int, index: int) -> None:
    """Raise ContractError where a later segment is sealed."""
    for found in re.finditer(re.escape(MAGIC), file[position:]):
        later = read_segment_header(file, position + found.start())
        if later is not None and later.index > index and later.end <= len(file):
            raise _damaged(path, index, f"its header, bytes {position} to {position + HEADER.size}")


def _damaged(path: Path, index: int, part: str) -> ContractError:
    return ContractError(
        f"{path.name} is damaged: the checksum of segment {index} does not match",
        where=f"{path}, {part}",
        do="copy the file again, or scan again",
    )
