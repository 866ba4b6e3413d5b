"""Published results: private work, one rename, a manifest of every file, one writer at a time."""

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from fcntl import LOCK_EX, LOCK_NB, flock
from hashlib import file_digest
from pathlib import Path
from typing import Any

from instruments.durable import sync, sync_tree
from instruments.errors import ContractError, UserError
from stages.artifacts.job import Table

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """What a published folder holds and how it came about; beside its table it holds no times."""

    fingerprint: str
    recipe: Mapping[str, Any]
    files: Mapping[str, Mapping[str, Any]]  # path inside the folder -> {"size": bytes, "sha256": hex}
    table: Table

    def write(self, folder: Path) -> Path:
        """Write `folder/manifest.json`."""
        path = folder / MANIFEST
        path.write_text(json.dumps(asdict(self), indent=1, sort_keys=True, default=str) + "\n")
        return path

    @classmethod
    def read(cls, folder: Path, *, remedy: str) -> "Manifest":
        """Read what `write` wrote.

        Raises:
            ContractError: missing or damaged; `remedy` is its way out.
        """
        path = folder / MANIFEST
        try:
            values = json.loads(path.read_text())
            return cls(**{**values, "table": Table(**values["table"])})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ContractError(f"no readable manifest: {error}", where=str(path), do=remedy) from error


def is_complete(folder: Path) -> bool:
    """Whether the folder was published; publishing is one rename, so a manifest vouches for all of it."""
    return (folder / MANIFEST).is_file()


def describe_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of every file below the folder, by relative path."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": hash_file(path)} for path in paths
    }


def hash_file(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def verify(folder: Path, *, remedy: str) -> None:
    """Check every file against the manifest before anything is built on it.

    Raises:
        ContractError: naming every file that is missing or was changed; `remedy` is its way out.
    """
    faults = []
    for name, expected in Manifest.read(folder, remedy=remedy).files.items():
        path = folder / name
        if not path.is_file():
            faults.append(f"{path} is missing")
        elif path.stat().st_size != expected["size"]:
            faults.append(f"{path} has {path.stat().st_size} bytes; {expected['size']} were published")
        elif hash_file(path) != expected["sha256"]:
            faults.append(f"{path} was changed after it was published")
    if faults:
        raise ContractError(f"the result of {folder.parent.name} is damaged", where="; ".join(faults), do=remedy)


LOCK_TIMEOUT = 0.3  # seconds


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
    deadline = time.monotonic() + LOCK_TIMEOUT
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            flock(descriptor, LOCK_EX | LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode() or "just started"
            os.close(descriptor)
            if time.monotonic() < deadline:
                time.sleep(LOCK_TIMEOUT / 10)
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


@dataclass(frozen=True)
class StagingDir:
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
def open_workshop(final: Path, *, fresh: bool) -> Iterator[StagingDir]:
    """Lock the fingerprint and hand out its workshop; `fresh` also forgets unfinished work of earlier runs.

    Raises:
        LockedError: another process is computing this fingerprint.
    """
    workshop = StagingDir(final)
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
        workshop = StagingDir(stage_folder / name.removeprefix("."))
        with suppress(LockedError), hold_lock(workshop.lock):  # locked: its run is alive
            workshop.recover()


def remove(folder: Path) -> None:
    """Remove a folder with all that is in it, if it is there."""
    shutil.rmtree(folder, ignore_errors=True)


def remove_if_empty(folder: Path) -> None:
    """Remove the folder unless something is in it, or it is gone already."""
    with suppress(OSError):
        folder.rmdir()


def publish(workshop: StagingDir, *, fingerprint: str, recipe: Mapping[str, Any], table: Table) -> Manifest:
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
