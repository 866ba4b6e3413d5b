"""SHA-256 of whole files; those of large files are remembered while size, times and inode stay the same."""

import json
import time
from contextlib import suppress
from pathlib import Path

from instruments.durable import hash_file, whole_file

# Smaller files are hashed every time.
REMEMBERED_BYTES = 2**20
# Nanoseconds: a file that changed just now may change again within one tick of its file system's clock.
SETTLED = 2 * 10**9


class FileHashes:
    """Hashes kept in a JSON file. Every write changes a file's ctime, which no program can set back."""

    def __init__(self, path: Path) -> None:
        """Read what `path` holds; a missing or damaged file only costs time."""
        self._path = path
        self._known: dict[str, list[object]] = {}
        with suppress(OSError, ValueError, TypeError):
            self._known = dict(json.loads(path.read_text(encoding="utf-8")))

    def __call__(self, file: Path) -> str:
        """SHA-256 of a file's bytes, read again only where the file may have changed. Raises OSError."""
        status, start = file.stat(), time.time_ns()
        if status.st_size < REMEMBERED_BYTES:
            return hash_file(file)
        key = str(file.absolute())
        state = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        match self._known.get(key):
            case [*known, str(digest)] if known == state:
                return digest
        digest = hash_file(file)
        if start - status.st_ctime_ns > SETTLED:
            self._known[key] = [*state, digest]
            self._save()
        return digest

    def _save(self) -> None:
        present = {key: value for key, value in self._known.items() if Path(key).exists()}
        with suppress(OSError):  # a full disk, or another process at the same moment: hashed again next time
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(self._path) as unfinished:
                unfinished.write_text(json.dumps(present, indent=0), encoding="utf-8")
