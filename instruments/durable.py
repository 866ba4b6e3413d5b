"""Write files that are complete and on the disk before anyone relies on them."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import file_digest
from pathlib import Path
from typing import Any


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


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path, renamed to `path` once on the disk; after an error or a kill `path` is unchanged."""
    unfinished = path.with_suffix(".partial")
    try:
        yield unfinished
        sync(unfinished)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    unfinished.rename(path)
    sync(path.parent)


def write_json(path: Path, content: Any) -> None:  # noqa: ANN401 - any JSON value
    """Write a JSON file that appears only when it is complete."""
    with whole_file(path) as unfinished:
        unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def hash_file(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()
