"""Where a killed training goes on."""

import os
import shutil
from pathlib import Path

WHOLE = "whole"  # marks a folder in which nothing is missing
_PREFIX = "checkpoint-"


def mark_whole(folder: Path) -> None:
    """Say that everything in the folder has been written, once it is on the disk."""
    for path in folder.rglob("*"):
        _sync(path)
    (folder / WHOLE).touch()
    _sync(folder)


def is_whole(folder: Path) -> bool:
    """Whether it was marked."""
    return (folder / WHOLE).exists()


def find_latest(folder: Path) -> tuple[Path, int] | None:
    """The last whole checkpoint of a phase, and its step within the phase."""
    found = [(int(path.name.removeprefix(_PREFIX)), path) for path in folder.glob(f"{_PREFIX}*") if is_whole(path)]
    if not found:
        return None
    step, path = max(found)
    return path, step


def drop_unfinished(folder: Path) -> None:
    """Remove what a kill left half written."""
    for path in folder.glob("*"):
        if path.is_dir() and not is_whole(path):
            shutil.rmtree(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
