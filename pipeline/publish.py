"""From a private workshop to a published folder, in one rename."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.checkpoint.durable import sync, sync_tree
from pipeline.artifact import Manifest, describe_files
from pipeline.lock import LockedError, hold_lock
from stages.contracts.job import Table


@dataclass(frozen=True)
class Workshop:
    """Where a stage works before its result is published: a hidden folder beside it, so that a rename suffices.

    `out` starts empty in every run; `scratch` survives a kill. Whoever holds the lock owns both.
    """

    final: Path

    @property
    def root(self) -> Path:
        """Folder of this fingerprint's unfinished work."""
        return self.final.with_name(f".{self.final.name}")

    @property
    def out(self) -> Path:
        """What will be published."""
        return self.root / "out"

    @property
    def scratch(self) -> Path:
        """What a later run may go on from."""
        return self.root / "scratch"

    @property
    def replaced(self) -> Path:
        """The old result, for the moment between two renames."""
        return self.root / "replaced"

    @property
    def lock(self) -> Path:
        """The lock file."""
        return self.root.with_suffix(".lock")

    def recover(self) -> None:
        """Clean up after a killed run: what is half written goes, scratch stays unless its result is published."""
        if self.replaced.exists() and not self.final.exists():
            self.replaced.rename(self.final)
        remove(self.root if self.final.exists() else self.out)
        remove_if_empty(self.scratch)
        remove_if_empty(self.root)


@contextmanager
def open_workshop(final: Path, *, fresh: bool) -> Iterator[Workshop]:
    """Lock the fingerprint and hand out its workshop; `fresh` also forgets unfinished work of earlier runs.

    Raises:
        LockedError: another process is computing this fingerprint.
    """
    workshop = Workshop(final)
    final.parent.mkdir(parents=True, exist_ok=True)
    with hold_lock(workshop.lock):
        workshop.recover()
        if fresh:
            remove(workshop.root)
        workshop.out.mkdir(parents=True)
        workshop.scratch.mkdir(exist_ok=True)
        try:
            yield workshop
        finally:
            workshop.recover()


def remove_leftovers(stage_folder: Path) -> None:
    """Clean up after all killed runs of a stage, whatever their fingerprint."""
    for name in {path.name.removesuffix(".lock") for path in stage_folder.glob(".*")}:
        workshop = Workshop(stage_folder / name.removeprefix("."))
        with suppress(LockedError), hold_lock(workshop.lock):  # locked: its run is alive
            workshop.recover()


def remove(folder: Path) -> None:
    """Remove a folder with all that is in it, if it is there."""
    shutil.rmtree(folder, ignore_errors=True)


def remove_if_empty(folder: Path) -> None:
    """Remove the folder unless something is in it, or it is gone already."""
    with suppress(OSError):
        folder.rmdir()


def publish(workshop: Workshop, *, fingerprint: str, recipe: Mapping[str, Any], table: Table) -> Manifest:
    """Make the workshop's `out` the published result; scratch is removed.

    A kill at any moment leaves the old result or the new one, never a part of one.
    """
    manifest = Manifest(fingerprint, recipe, describe_files(workshop.out), table)
    manifest.write(workshop.out)
    sync_tree(workshop.out)
    if workshop.final.exists():
        workshop.final.rename(workshop.replaced)
    workshop.out.rename(workshop.final)
    sync(workshop.final.parent)
    remove(workshop.root)
    return manifest
