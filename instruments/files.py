"""Write files that are complete and on the disk before anyone relies on them."""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import file_digest, sha256
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
    write_text(path, json_text(content))


def json_text(content: Any) -> str:  # noqa: ANN401 - any JSON value
    """What `write_json` writes."""
    return json.dumps(content, indent=1) + "\n"


def hash_file(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def hash_files(folder: Path) -> dict[str, str]:
    """Relative path → SHA-256, for every file below the folder."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {path.relative_to(folder).as_posix(): hash_file(path) for path in files}


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
