"""Files that are complete and on the disk before anyone relies on them; JSON, checked when it is read."""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from errno import EINVAL, ENOLCK, ENOSYS, ENOTSUP
from hashlib import file_digest, sha256
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

# Errors of flock on file systems without it: Lustre mounted without -o flock, NFS without its lock service.
WITHOUT_FLOCK = {ENOSYS, ENOTSUP, ENOLCK}
# Errors of fsync on file systems that flush no folders: SMB, some of FUSE.
WITHOUT_FSYNC = {EINVAL, ENOSYS, ENOTSUP}


def sync(path: Path) -> None:
    """Flush one file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in WITHOUT_FSYNC or path.is_file():
            raise
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Flush every file and folder to the disk, inner ones first; files get the rights of `folder` to read.

    safetensors ignores the umask: only the owner can read the files that it writes.
    """
    readers = folder.stat().st_mode & 0o444
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_file():
            path.chmod(path.stat().st_mode | readers)
        sync(path)
    sync(folder)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path, renamed to `path` once on the disk; after an error or a kill `path` is unchanged."""
    unfinished = path.with_name(f"{path.name}.partial")
    try:
        yield unfinished
        sync(unfinished)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    unfinished.rename(path)
    sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a file that appears only when it is complete; characters that UTF-8 lacks are escaped."""
    with whole_file(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8", errors="backslashreplace")


def write_json(path: Path, content: Any) -> None:  # noqa: ANN401 - any JSON value
    """Write a JSON file that appears only when it is complete."""
    write_text(path, json.dumps(content, indent=1) + "\n")


def hash_file(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def hash_code(root: Path, sources: Iterable[str]) -> str:
    """SHA-256 of the .py and .lua files among `sources`, files and folders below `root`, and of their names."""
    digest = sha256()
    for source in sources:
        path = root / source
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.suffix in {".py", ".lua"}:
                digest.update(f"{file.relative_to(root).as_posix()}\0{file.stat().st_size}\0".encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()


# Type predicates for JSON that is read, as it may have been edited.
Kind = Callable[[object], bool]
_LARGEST = 2**63


def is_text(value: object) -> bool:
    """A string without surrogates, so that it can be encoded."""
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)


def plain_text(text: str) -> str:
    """The text with surrogates escaped: names of files that are not UTF-8 have some."""
    return text.encode("utf-8", "backslashreplace").decode()


def is_count(value: object) -> bool:
    """An integer from 0 to 2⁶³ − 1."""
    return type(value) is int and 0 <= value < _LARGEST


def is_flag(value: object) -> bool:
    """True or false."""
    return isinstance(value, bool)


def is_number(value: object) -> bool:
    """A number; a loss may be NaN or infinite."""
    return isinstance(value, float) or (type(value) is int and abs(value) < _LARGEST)


def is_anything(_value: object) -> bool:
    """Any JSON value."""
    return True


def list_of(kind: Kind, length: int | None = None) -> Kind:
    """A list of this kind; `length` None allows any length."""
    return lambda value: isinstance(value, list) and length in {None, len(value)} and all(map(kind, value))


def object_of(kind: Kind) -> Kind:
    """An object with any keys and values of this kind."""
    return lambda value: isinstance(value, dict) and all(map(is_text, value)) and all(map(kind, value.values()))


_PLAIN: dict[object, Kind] = {int: is_count, float: is_number, str: is_text, bool: is_flag}


def kind_of(hint: Any) -> Kind:  # noqa: ANN401 - any annotation
    """The predicate of an annotation: plain type, X | None, list, tuple, mapping from str, dataclass; else anything."""
    origin, parts = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        parts_of = kinds_of(hint)
        return lambda value: (
            isinstance(value, dict) and all(n in value and kind(value[n]) for n, kind in parts_of.items())
        )
    if origin is UnionType:
        given = kind_of(parts[0])
        return lambda value: value is None or given(value)
    if origin in {list, tuple}:
        return list_of(kind_of(parts[0]), None if origin is list or ... in parts else len(parts))
    if origin in {dict, Mapping}:
        return object_of(kind_of(parts[1]))
    return _PLAIN.get(hint, is_anything)


def kinds_of(fields: Any) -> dict[str, Kind]:  # noqa: ANN401 - a dataclass
    """The predicate of every field of a dataclass."""
    return {name: kind_of(hint) for name, hint in get_type_hints(fields).items()}


def check_fields(content: Any, kinds: Mapping[str, Kind]) -> None:  # noqa: ANN401 - any JSON
    """Raise ValueError, naming every field that is missing or of another type."""
    if not isinstance(content, dict):
        raise ValueError("it is not an object")
    if wrong := [name for name, is_kind in kinds.items() if name not in content or not is_kind(content[name])]:
        raise ValueError(f"{', '.join(wrong)} missing or of another type")


def plain_json(value: Any) -> Any:  # noqa: ANN401 - JSON values
    """Make a value strict JSON: non-finite floats become text that float() reads, tuples become lists."""
    if isinstance(value, dict):
        return {key: plain_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
