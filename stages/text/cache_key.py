"""Checks and cache key of the text, before any model is loaded."""

import hashlib
import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

from instruments.errors import DataError, UserError
from instruments.files import hash_file
from stages.text.config import (
    KINDS,
    DataConfig,
    calibration_only,
    check_settings,
    list_sources,
    mixture_errors,
    name_source,
)
from stages.text.documents import Split
from stages.text.hub import describe_missing_package, find_commit
from stages.text.python_stdlib import list_modules
from stages.text.sources import describe_emptiness, list_files, read_documents, read_file, require_conversations

# Documents of each file that are checked.
FIRST_DOCUMENTS = 20


def check_first_records(data: DataConfig, *, heldout: bool = True) -> list[UserError]:
    """Faults of the paths, of each local file's first records, and of the installation. Settings must be valid.

    An empty held-out split is a fault only with `heldout`.
    """
    if data.kind == "mixture":
        named = data.heldout_path is not None
        found = _check_path(str(data.heldout_path), "data.heldout_path", data) if named else []
        for number, part in enumerate(list_sources(data)):
            of_source = check_first_records(part.data, heldout=heldout and not named)
            found += [name_source(error, number) for error in of_source]
        return found
    if data.kind == "hub":
        return [] if importlib.util.find_spec("datasets") else [describe_missing_package()]
    if data.kind == "python_stdlib":
        return []
    paths = {"data.path": data.path, "data.heldout_path": data.heldout_path}
    errors = [error for option, path in paths.items() if path for error in _check_path(path, option, data)]
    if errors:
        return errors
    splits: tuple[Split, ...] = ("calibration", "heldout") if heldout else ("calibration",)
    try:
        for split in splits:
            if next(read_documents(data, split), None) is None:
                errors.append(describe_emptiness(data, split))  # noqa: PERF401 - kept where the next split raises
    except DataError as error:
        errors.append(error)
    return errors


def _check_path(path: str, option: str, data: DataConfig) -> list[UserError]:
    try:
        files = list_files(path, option)
    except DataError as error:
        return [error]
    errors: list[UserError] = []
    found = 0
    for file in files:
        documents = read_file(file, data)
        if data.labels == "completion" and option == "data.path":
            documents = require_conversations(documents)
        try:
            found += sum(1 for _ in islice(documents, FIRST_DOCUMENTS))
        except DataError as error:
            errors.append(error)
    if not errors and not found:
        return [DataError("the text is empty", where=f"{option}={path}", do=f"{option}=text that holds something")]
    return errors


# Incremented when a change of the readers gives other tokens for the same text.
READER_VERSION = 5


def data_cache_key(data: DataConfig, hash_of: Callable[[Path], str] = hash_file) -> dict[str, object]:
    """What the token sequences depend on in addition to the settings, as JSON; equal for equal text.

    Contains the hash of each local file, the Python version and module sizes of the standard library, or the name and
    commit of a dataset of the hub; `hash_of` gives a file's SHA-256. Raises DataError: a path cannot be read.
    """
    if data.kind == "mixture":
        source: dict[str, object] = {"sources": [data_cache_key(part.data, hash_of) for part in list_sources(data)]}
    elif data.kind == "text":
        source = {"files": _hash_files(str(data.path), "data.path", hash_of)}
    elif data.kind == "hub":
        source = {"name": data.name, "subset": data.subset, "revision": data.revision}
        if (folder := Path(str(data.name))).is_dir():
            source["files"] = [hash_of(file) for file in sorted(folder.rglob("*")) if file.is_file()]
        else:
            source["commit"] = find_commit(data)
    else:
        sizes = sorted((module.name, module.path.stat().st_size) for module in list_modules())
        modules = hashlib.sha256(repr(sizes).encode()).hexdigest()
        source = {"python": sys.version.split()[0], "modules": modules}
    if data.kind in {"text", "mixture"} and data.heldout_path is not None:
        source["heldout_files"] = _hash_files(data.heldout_path, "data.heldout_path", hash_of)
    return {"kind": data.kind, "reader": READER_VERSION, **source}


def calibration_cache_key(
    data: DataConfig, key: dict[str, object], recall: Callable[[str, Callable[[], str]], str]
) -> dict[str, object]:
    """What the calibration text depends on: `key` of `data_cache_key`, but of held-out files only what they exclude.

    So another held-out text changes no result of a stage that does not read it. `recall(question, find)` returns an
    earlier answer, or finds and keeps it: all documents have to be read.
    """
    parts = [part.data for part in list_sources(data)] or [replace(data, heldout_path=None, heldout_share=0.0)]
    if "heldout_files" not in key or any(part.kind == "hub" for part in parts):
        return key
    question = json.dumps([key, asdict(replace(calibration_only(data), tokens=0))], sort_keys=True)
    try:
        excluded = recall(hashlib.sha256(question.encode()).hexdigest(), lambda: _hash_copies(data, parts))
    except DataError:  # maybe of a record that no stage reads
        return key
    return {name: value for name, value in key.items() if name != "heldout_files"} | {"excluded": excluded}


def _hash_copies(data: DataConfig, parts: list[DataConfig]) -> str:
    """Hash of the documents of the sources that are also in the held-out text; empty if there are none."""
    heldout = {document.digest for document in read_documents(data, "heldout")}
    found = (document.digest for part in parts for document in read_documents(part, "calibration"))
    copies = heldout.intersection(found)
    return hashlib.sha256(b"".join(sorted(copies))).hexdigest() if copies else ""


def _hash_files(path: str, option: str, hash_of: Callable[[Path], str]) -> list[str]:
    """Hash and suffix of each file; the suffix decides how it is read."""
    return [hash_of(file) + file.suffix.lower() for file in list_files(path, option)]


def check_data(data: DataConfig, *, heldout: bool = True) -> list[UserError]:
    """Faults of the settings; if there are none, faults of the paths and the first records. Reads little."""
    if data.kind not in KINDS or data.max_length < 2:  # the fields' own checks report these
        return []
    errors = check_settings(data) or (list(mixture_errors(data)) if data.kind == "mixture" else [])
    return errors or check_first_records(data, heldout=heldout)
