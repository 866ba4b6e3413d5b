"""One writer per fingerprint, held by the kernel, so that a killed run never leaves a lock behind."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path

from models.errors import UserError

PATIENCE = 0.3  # seconds


class LockedError(UserError):
    """Another process is at work on the same result."""


@contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Hold `path` as an exclusive lock; it is gone afterwards.

    Raises:
        LockedError: another process holds it.
    """
    descriptor = acquire(path)
    try:
        os.truncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())
        yield
    finally:
        path.unlink(missing_ok=True)  # while still held, so that nobody locks a file about to vanish
        os.close(descriptor)


def acquire(path: Path) -> int:
    """Open and lock the file that `path` names now; waits a moment for those who only clean up."""
    deadline = time.monotonic() + PATIENCE
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            flock(descriptor, LOCK_EX | LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode() or "just started"
            os.close(descriptor)
            if time.monotonic() < deadline:
                time.sleep(PATIENCE / 10)
                continue
            raise LockedError(
                "another run is computing the same result",
                where=f"process {holder}, lock {path}",
                do="wait for it, then run the same command again: what it publishes will be reused",
            ) from None
        if is_same_file(descriptor, path):
            return descriptor
        os.close(descriptor)  # its holder removed it between our open and our lock


def is_same_file(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
