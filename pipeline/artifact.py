"""Published results: a folder with a manifest that names every file, its size and its hash."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import file_digest
from pathlib import Path
from typing import Any

from models.errors import ContractError
from stages.contracts.job import Table

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
