"""Published results: each is written in a private folder by one process, gets a manifest, and is renamed as a whole."""

import json
import logging
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, flock
from hashlib import sha256
from pathlib import Path, PurePosixPath
from shutil import rmtree
from types import MappingProxyType
from typing import Any

from filelock import FileLock, SoftFileLock, Timeout

from instruments.errors import ContractError, UserError, some
from instruments.files import WITHOUT_FLOCK, hash_file, is_count, sync, sync_tree, write_json
from stages.artifacts.job import Table

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
# Key of the recipe for hashes of the parents' tensors, which settings do not determine: another device, or another
# version of torch, rounds differently. Not in the fingerprint.
READ = "read"
SHORT = 16  # characters of a fingerprint in the name of its folder
LOCK_TIMEOUT = 0.3  # seconds; enough for another process that only cleans up
# Smaller files are hashed every time.
REMEMBERED_BYTES = 2**20
MOST_FILES = 6  # named in a message
LONG_READ = 2**31  # bytes; takes seconds
ANSWER = "answer "  # and the question: a key that is no absolute path
# Errors from reading JSON that may have been changed by hand.
UNREADABLE = (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
# Nanoseconds. A file that changed more recently may change again without a new timestamp, so its hash is not kept.
SETTLED = 2 * 10**9


def artifact_folder(output_dir: Path, label: str, stage: str, fingerprint: str) -> Path:
    """Folder of a published result: `artifacts/<model>/<stage>/<fingerprint>`."""
    return output_dir / "artifacts" / label / stage / fingerprint[:SHORT]


@dataclass(frozen=True)
class Manifest:
    """Contents and origin of a published folder; the file also holds a hash of itself, and no timestamps."""

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
        """Read `folder/manifest.json`. Raises ContractError with this remedy: missing, or damaged."""
        path = folder / MANIFEST
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            seal = values.pop("seal")
            manifest = cls(**{**values, "table": _read_table(**values["table"])})
            sizes = [facts.get("size", 0) for facts in manifest.files.values()]
            if not manifest.fingerprint.isalnum() or not all(map(is_count, sizes)):
                raise ValueError("values of another type")
        except UNREADABLE as error:
            raise ContractError(f"no readable manifest: {error}", where=str(path), do=remedy) from error
        if seal != _seal(values):
            raise ContractError("the manifest was changed after it was published", where=str(path), do=remedy)
        if outside := [name for name in manifest.files if name.startswith("/") or ".." in PurePosixPath(name).parts]:
            raise ContractError(f"the manifest names files outside its folder: {outside}", where=str(path), do=remedy)
        return manifest


def _read_table(
    title: object, columns: Sequence[object], rows: Sequence[Sequence[object]], notes: list[object]
) -> Table:
    if any(len(row) != len(columns) for row in rows):
        raise ValueError("rows of a table that do not fit its columns")
    return Table(str(title), [*map(str, columns)], [[*row] for row in rows], [*map(str, notes)])


def _seal(values: Mapping[str, Any]) -> str:
    return sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def is_complete(folder: Path) -> bool:
    """Whether the folder was published: it contains its manifest when it is renamed to its final name."""
    return (folder / MANIFEST).is_file()


def describe_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Relative path → size and SHA-256, for every file below the folder."""
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    with ThreadPoolExecutor() as pool:
        digests = pool.map(hash_file, files.values())
        return {
            name: {"size": path.stat().st_size, "sha256": digest}
            for (name, path), digest in zip(files.items(), digests, strict=True)
        }


def tensors_hash(folder: Path) -> str:
    """Hash of a published folder's tensor files by its manifest. Raises ContractError: the manifest is not readable."""
    files = Manifest.read(folder, remedy="").files
    return _seal({name: facts.get("sha256") for name, facts in files.items() if name.endswith(".safetensors")})


class FileHashes:
    """Hashes of large files and slow answers, in a JSON file. Every write changes a file's ctime, for good."""

    def __init__(self, output_dir: Path) -> None:
        """Read `artifacts/hashes.json`; if it is missing or damaged, files are hashed again."""
        self._path = path = output_dir / "artifacts" / "hashes.json"
        self._known: dict[str, list[object]] = {}
        self._unsaved, self._saved = False, 0.0
        with suppress(*UNREADABLE):
            self._known = dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}

    def __call__(self, file: Path) -> str:
        """SHA-256 of a file's bytes, which are read again only if the file may have changed. Raises OSError."""
        status, start = file.stat(), time.time_ns()
        if status.st_size < REMEMBERED_BYTES:
            return hash_file(file)
        key = str(file.absolute())
        state = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        match self._known.get(key):
            case [*known, str(digest)] if known == state:
                return digest
        if status.st_size > LONG_READ:
            log.warning("reading %s once (%.0f GB): results depend on its content", file, status.st_size / 1e9)
        digest = hash_file(file)
        if start - status.st_ctime_ns > SETTLED:
            self._keep(key, [*state, digest])
        return digest

    def recall(self, question: str, find: Callable[[], str]) -> str:
        """The answer that `find` gave to a question; `question` covers all that it depends on."""
        match self._known.get(f"{ANSWER}{question}"):
            case [str(answer)]:
                return answer
        answer = find()
        self._keep(f"{ANSWER}{question}", [answer])
        return answer

    def _keep(self, key: str, value: list[object]) -> None:
        """Keep it; once a second in the file, too."""
        self._known[key], self._unsaved = value, True
        if time.monotonic() - self._saved > 1:
            self.save()

    def save(self) -> None:
        """Write what is new to the file, without what is known of files that were removed."""
        if not self._unsaved:
            return
        present = {key: value for key, value in self._known.items() if key.startswith(ANSWER) or os.path.exists(key)}  # noqa: PTH110 - of Path, it raises for a closed folder
        with suppress(OSError):  # a full disk, or another process writes too: it is found again next time
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._path, present)
        self._saved, self._unsaved = time.monotonic(), False


def verify(folder: Path, *, remedy: str, hash_of: Callable[[Path], str] = hash_file) -> None:
    """Check every file of a published result against its manifest; `remedy` is the command that computes it again.

    Raises ContractError: files are missing, were changed or were added; all of them are named. Loaders find files by
    name (an adapter, a second tokenizer, shards), so an added file may make the folder another model.
    """
    manifest = Manifest.read(folder, remedy=remedy)
    present = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*"))}
    faults = []
    for name, expected in manifest.files.items():
        path = folder / name
        if name not in present or not path.is_file():
            faults.append(f"{path} is missing")
        elif path.stat().st_size != expected.get("size") or hash_of(path) != expected.get("sha256"):
            faults.append(f"{path} was changed after it was published")
    if not manifest.fingerprint.startswith(folder.name):
        faults.append(f"{folder} holds the result {manifest.fingerprint}")
    if faults:
        raise ContractError(f"the result of {folder.parent.name} is damaged", where="; ".join(faults), do=remedy)
    unknown = present.keys() - {MANIFEST, *manifest.files}
    if added := sorted(present[name] for name in unknown if _is_loadable(folder, name)):
        what = f"files were added to the result of {folder.parent.name} after it was published"
        do = f"{shlex.join(['mv', *map(str, added), '.'])}, or {remedy}"
        raise ContractError(what, where=some(map(str, added), MOST_FILES, ", "), do=do)


def _is_loadable(folder: Path, name: str) -> bool:
    """Whether `name` is a file or a link that loaders may read: they ignore hidden and GGUF files."""
    path, hidden = folder / name, any(part.startswith(".") for part in name.split("/"))
    return not hidden and path.suffix != ".gguf" and (path.is_symlink() or not path.is_dir())


class LockedError(UserError):
    """Another process is writing the same result."""


@contextmanager
def hold_lock(path: Path, *, wait: bool = False, task: str = "computing the same result") -> Iterator[None]:
    """Hold the lock file `path`, which names this process until the end. Raises LockedError: taken, and not `wait`."""
    lock = FileLock(path, timeout=LOCK_TIMEOUT)
    try:
        lock.acquire()
    except Timeout:
        holder = "just started"
        with suppress(OSError):
            holder = path.read_text(encoding="utf-8").partition("\n")[0] or holder
        if not wait:
            do = "wait for it, then run the same command again: what it has written will be reused"
            raise LockedError(f"another run is {task}", where=f"process {holder}, lock {path}", do=do) from None
        log.info("%-9s waiting for process %s, which is %s", path.parent.name, holder, task)
        lock.acquire(timeout=-1, poll_interval=LOCK_TIMEOUT)
    except OSError as error:
        if error.errno not in WITHOUT_FLOCK:  # without flock a run goes on, and `output_in_use` warns
            raise
    try:
        if not isinstance(lock, SoftFileLock):  # filelock's own way without flock, which has written more than this
            path.write_text(str(os.getpid()))
        yield
    finally:
        path.unlink(missing_ok=True)  # while still held: a process that has just opened this file then opens a new one
        lock.release()


@contextmanager
def output_in_use(output_dir: Path, *, alone: bool = False) -> Iterator[None]:
    """Use the output folder together with other runs, or `alone`. Raises LockedError: a run is, or may be, active.

    Results that an active run will read are known to nobody else.
    """
    path = output_dir / "artifacts" / ".in_use"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        try:
            flock(file, LOCK_EX | LOCK_NB if alone else LOCK_SH)
        except BlockingIOError as error:
            raise LockedError("a run is active", where=str(output_dir), do="wait for its end") from error
        except OSError as error:
            if error.errno not in WITHOUT_FLOCK:
                raise
            what = f"this file system has no locks ({error.strerror})"
            if alone:
                do = "when no run is active, delete folders of runs and results by hand"
                raise LockedError(f"{what}, so a run may be active", where=str(output_dir), do=do) from error
            log.warning("%s: %s, so start no second run with the same stages until this one ends", output_dir, what)
        yield


class StagingDir:
    """Private folder of a stage, of the process with the lock: hidden, next to the result, so a rename publishes it."""

    def __init__(self, final: Path) -> None:
        """`final` is the folder to publish."""
        self.final = final
        self.root = final.with_name(f".{final.name}")
        self.out = self.root / "out"  # files to publish; empty at the start of every run
        self.scratch = self.root / "scratch"  # files from which a later run resumes, also after a kill
        self.read = self.root / "read.json"  # hashes of the parents' tensors that the files in `scratch` depend on
        self.replaced = self.root / "replaced"  # the old result, between the two renames of `publish`
        self.lock = self.root.with_suffix(".lock")

    def recover(self) -> None:
        """Clean up after a killed run: remove half-written files, keep scratch until its result is published."""
        if self.replaced.exists() and not self.final.exists():
            self.replaced.rename(self.final)
        published = self.final.exists()
        with suppress(ContractError, *UNREADABLE):  # a result of other tensors is still to be replaced
            read = json.loads(self.read.read_text(encoding="utf-8"))
            published = Manifest.read(self.final, remedy="").recipe.get(READ, {}) == read
        rmtree(self.root if published else self.out, ignore_errors=True)
        with suppress(OSError):  # not empty, or already removed
            self.scratch.rmdir()
            self.read.unlink(missing_ok=True)
        with suppress(OSError):
            self.root.rmdir()

    def read_others(self, read: Mapping[str, str]) -> bool:
        """Whether the killed run had other tensors of its parents than `read`."""
        with suppress(*UNREADABLE):  # no file, or a damaged one
            return bool(json.loads(self.read.read_text(encoding="utf-8")) != read)
        return bool(read)


@contextmanager
def open_staging(
    final: Path, *, fresh: bool, wait: bool = False, read: Mapping[str, str] = MappingProxyType({})
) -> Iterator[StagingDir]:
    """Lock the result and make its staging folder. Raises LockedError.

    Removes unfinished work with `fresh`, and if it depends on other tensors of the parents than the hashes in `read`.
    """
    staging = StagingDir(final)
    final.parent.mkdir(parents=True, exist_ok=True)
    with hold_lock(staging.lock, wait=wait):
        staging.recover()
        if fresh or staging.read_others(read):
            rmtree(staging.root, ignore_errors=True)
        staging.out.mkdir(parents=True)
        staging.scratch.mkdir(exist_ok=True)
        try:
            if read:
                write_json(staging.read, dict(read))
            yield staging
        finally:
            staging.recover()


def remove_leftovers(kept: Path) -> None:
    """Clean up after all killed runs of a stage; remove unfinished work that was to replace the result `kept`."""
    for name in {path.name.removesuffix(".lock") for path in kept.parent.glob(".*")}:
        staging = StagingDir(kept.with_name(name.removeprefix(".")))
        with suppress(LockedError), hold_lock(staging.lock):  # LockedError: the run is still active
            staging.recover()
            if staging.final == kept:  # its parents hold the tensors again from which it was computed
                rmtree(staging.root, ignore_errors=True)


def publish(staging: StagingDir, *, fingerprint: str, recipe: Mapping[str, Any], table: Table) -> Manifest:
    """Publish the staging folder's `out` and remove its scratch.

    After a kill at any moment, the old or the new result is complete (`recover` undoes a replacement cut short).
    """
    manifest = Manifest(fingerprint, recipe, describe_files(staging.out), table)
    manifest.write(staging.out)
    sync_tree(staging.out)
    if staging.final.exists():
        staging.final.rename(staging.replaced)
    staging.out.rename(staging.final)
    sync(staging.final.parent)
    rmtree(staging.root, ignore_errors=True)
    return manifest
