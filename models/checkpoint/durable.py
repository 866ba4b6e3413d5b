"""What is written reaches the disk before anyone relies on it."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Flush one file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Flush every file and folder to the disk, inner ones first."""
    for path in sorted(folder.rglob("*"), reverse=True):
        sync(path)
    sync(folder)
