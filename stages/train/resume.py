"""Where a killed training goes on."""

import shutil
from pathlib import Path

from models.checkpoint.durable import sync, sync_tree

WHOLE = "whole"  # marks a folder in which nothing is missing
_PREFIX = "checkpoint-"


def mark_whole(folder: Path) -> None:
    """Say that everything in the folder has been written, once it is on the disk."""
    sync_tree(folder)
    (folder / WHOLE).touch()
    sync(folder)


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
