"""Published results: private work, one rename, a manifest of every file, one writer at a time."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any

from filelock import FileLock, Timeout

from instruments.durable import hash_file, sync, sync_tree
from instruments.errors import ContractError, UserError
from pipeline.json_kinds import is_cell, is_count, is_text, list_of, object_of, object_with
from stages.artifacts.job import Table

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """What a published folder holds and how it came about; sealed with its own hash, and without any time."""

    fingerprint: str
    recipe: Mapping[str, Any]
    files: Mapping[str, Mapping[str, Any]]  # path inside the folder -> {"size": bytes, "sha256": hex}
    table: Table

    def write(self, folder: Path) -> Path:
        """Write `folder/manifest.json`."""
        path = folder / MANIFEST
        values = json.loads(json.dumps(asdict(self), default=str))
        path.write_text(json.dumps({**values, "seal": _seal(values)}, indent=1, sort_keys=True) + "\n")
        return path

    @classmethod
    def read(cls, folder: Path, *, remedy: str) -> "Manifest":
        """Read what `write` wrote.

        Raises:
            ContractError: missing, damaged, or naming files outside the folder; `remedy` is its way out.
        """
        path = folder / MANIFEST
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            seal = values.pop("seal")
            if not _IS_MANIFEST(values):
                raise ValueError("values of another type")
            table = values["table"]
            if any(len(row) != len(table["columns"]) for row in table["rows"]):
                raise ValueError("rows of a table that do not fit its columns")
            manifest = cls(**{**values, "table": Table(**table)})
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ContractError(f"no readable manifest: {error}", where=str(path), do=remedy) from error
        if seal != _seal(values):
            raise ContractError("the manifest was changed after it was published", where=str(path), do=remedy)
        if outside := [name for name in manifest.files if not _is_inside(name)]:
            raise ContractError(f"the manifest names files outside its folder: {outside}", where=str(path), do=remedy)
        return manifest


_IS_TABLE = object_with(title=is_text, columns=list_of(is_text), rows=list_of(list_of(is_cell)), notes=list_of(is_text))
_IS_MANIFEST = object_with(
    fingerprint=is_text,
    recipe=object_of(lambda _value: True),
    files=object_of(
        lambda facts: (
            isinstance(facts, dict) and is_count(facts.get("size", 0)) and isinstance(facts.get("sha256", ""), str)
        )
    ),
    table=_IS_TABLE,
)


def _seal(values: Mapping[str, Any]) -> str:
    return sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "\0" not in name


def is_complete(folder: Path) -> bool:
    """Whether the folder was published: publishing is one rename of a folder that holds its manifest."""
    return (folder / MANIFEST).is_file()


def describe_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of every file below the folder, by relative path."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": hash_file(path)} for path in paths
    }


def verify(folder: Path, *, remedy: str, hash_of: Callable[[Path], str] = hash_file) -> None:
    """Check every file of a published result against its manifest.

    Args:
        folder: the published result.
        remedy: the command that computes it again.
        hash_of: a file's SHA-256.
    Raises:
        ContractError: naming every file that is missing or was changed.
    """
    manifest = Manifest.read(folder, remedy=remedy)
    faults = []
    for name, expected in manifest.files.items():
        path = folder / name
        if not _is_present(path):
            faults.append(f"{path} is missing")
        elif path.stat().st_size != expected.get("size"):
            faults.append(f"{path} has {path.stat().st_size} bytes; {expected.get('size')} were published")
        elif hash_of(path) != expected.get("sha256"):
            faults.append(f"{path} was changed after it was published")
    if not manifest.fingerprint.startswith(folder.name):
        faults.append(f"{folder} holds the result {manifest.fingerprint}")
    if faults:
        raise ContractError(f"the result of {folder.parent.name} is damaged", where="; ".join(faults), do=remedy)


def _is_present(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that no file can have
        return False


LOCK_TIMEOUT = 0.3  # seconds; enough for another process that only cleans up


class LockedError(UserError):
    """Another process computes the same result."""


@contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Hold `path` as an exclusive lock, with this process's number in it; removed afterwards.

    Raises:
        LockedError: another process holds it.
    """
    lock = FileLock(path, timeout=LOCK_TIMEOUT)
    try:
        lock.acquire()
    except Timeout:
        raise LockedError(
            "another run is computing the same result",
            where=f"process {_holder(path)}, lock {path}",
            do="wait for it, then run the same command again: what it publishes will be reused",
        ) from None
    try:
        path.write_text(str(os.getpid()))
        yield
    finally:
        path.unlink(missing_ok=True)  # while still held: another process that has just opened it opens the next one
        lock.release()


def _holder(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="utf-8") or "just started"
    return "just started"


@dataclass(frozen=True)
class StagingDir:
    """Where a stage works before its result is published: a hidden folder next to it, so that one rename publishes.

    `out` starts empty in every run; `scratch` survives a kill. The process that holds the lock owns both.
    """

    final: Path

    @property
    def root(self) -> Path:
        """Folder of this fingerprint's unfinished work."""
        return self.final.with_name(f".{self.final.name}")

    @property
    def out(self) -> Path:
        """Files to publish."""
        return self.root / "out"

    @property
    def scratch(self) -> Path:
        """Files that a later run may continue from."""
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
        """Clean up after a killed run: half-written files go; scratch stays until its result is published."""
        if self.replaced.exists() and not self.final.exists():
            self.replaced.rename(self.final)
        remove(self.root if self.final.exists() else self.out)
        remove_if_empty(self.scratch)
        remove_if_empty(self.root)


@contextmanager
def open_staging(final: Path, *, fresh: bool) -> Iterator[StagingDir]:
    """Lock the fingerprint and make its staging folder; `fresh` also forgets unfinished work of earlier runs.

    Raises:
        LockedError: another process is computing this fingerprint.
    """
    staging = StagingDir(final)
    final.parent.mkdir(parents=True, exist_ok=True)
    with hold_lock(staging.lock):
        staging.recover()
        if fresh:
            remove(staging.root)
        staging.out.mkdir(parents=True)
        staging.scratch.mkdir(exist_ok=True)
        try:
            yield staging
        finally:
            staging.recover()


def remove_leftovers(stage_folder: Path) -> None:
    """Clean up after all killed runs of a stage."""
    for name in {path.name.removesuffix(".lock") for path in stage_folder.glob(".*")}:
        staging = StagingDir(stage_folder / name.removeprefix("."))
        with suppress(LockedError), hold_lock(staging.lock):  # locked: its run is alive
            staging.recover()


def remove(folder: Path) -> None:
    """Remove a folder with all that is in it, if it is there."""
    shutil.rmtree(folder, ignore_errors=True)


def remove_if_empty(folder: Path) -> None:
    """Remove the folder unless something is in it, or it is gone already."""
    with suppress(OSError):
        folder.rmdir()


def publish(staging: StagingDir, *, fingerprint: str, recipe: Mapping[str, Any], table: Table) -> Manifest:
    """Make the staging's `out` the published result; scratch is removed.

    A kill at any moment leaves the old result or the new one, never a part of one.
    """
    manifest = Manifest(fingerprint, recipe, describe_files(staging.out), table)
    manifest.write(staging.out)
    sync_tree(staging.out)
    if staging.final.exists():
        staging.final.rename(staging.replaced)
    staging.out.rename(staging.final)
    sync(staging.final.parent)
    remove(staging.root)
    return manifest
