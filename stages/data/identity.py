"""What the text is, and whether it can be read: known before any model is loaded."""

import hashlib
import sys
from pathlib import Path

from models.errors import UserError
from stages.data.config import DataConfig
from stages.data.first_records import check_first_records
from stages.data.python_stdlib import list_modules
from stages.data.settings import check_settings
from stages.data.text import list_files

# Counts changes of the readers that give other tokens for the same text.
READER_VERSION = 1


def data_identity(data: DataConfig) -> dict[str, object]:
    """What the token sequences depend on beside the settings: plain JSON, equal where the text is equal.

    Local files count by content, the standard library by Python version and module sizes, a dataset of the hub by
    name and revision.

    Raises:
        DataError: a path cannot be read.
    """
    if data.kind == "text":
        source: dict[str, object] = {"files": hash_files(list_files(str(data.path), "data.path"))}
        if data.heldout_path is not None:
            source["heldout_files"] = hash_files(list_files(data.heldout_path, "data.heldout_path"))
    elif data.kind == "hub":
        source = {"name": data.name, "subset": data.subset, "revision": data.revision}
        if (folder := Path(str(data.name))).is_dir():
            source["files"] = hash_files(sorted(file for file in folder.rglob("*") if file.is_file()))
    else:
        source = {"python": sys.version.split()[0], "modules": _hash_modules()}
    return {"kind": data.kind, "reader": READER_VERSION, **source}


def check_data(data: DataConfig, *, heldout: bool = True) -> list[UserError]:
    """Every fault of the settings, or else of the paths and the first records. Reads little, loads no library.

    Args:
        data: the settings.
        heldout: held-out text will be read, so that there has to be some.
    """
    return check_settings(data) or check_first_records(data, heldout=heldout)


def hash_files(files: list[Path]) -> list[str]:
    """SHA-256 of each file's content, in order: where the files lie does not matter."""
    hashes = []
    for file in files:
        with file.open("rb") as content:
            hashes.append(hashlib.file_digest(content, "sha256").hexdigest())
    return hashes


def _hash_modules() -> str:
    sizes = sorted((module.name, module.path.stat().st_size) for module in list_modules())
    return hashlib.sha256(repr(sizes).encode()).hexdigest()
