"""Cache key of the text, before any model is loaded."""

import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from instruments.errors import DataError
from instruments.files import hash_file
from stages.text.config import DataConfig, Source, calibration_only, list_sources
from stages.text.files import find_kind, list_files
from stages.text.hub import find_commit
from stages.text.python_stdlib import list_modules
from stages.text.sources import find_template_file, read_documents

# Incremented when a change of the readers gives other tokens for the same text.
READER_VERSION = 7


def data_cache_key(data: DataConfig, hash_of: Callable[[Path], str] = hash_file) -> dict[str, object]:
    """What the token sequences depend on in addition to the settings, as JSON; equal for equal text.

    Contains the hash of each local file, the Python version and module sizes of the standard library, or the
    commit of a dataset of the hub; `hash_of` gives a file's SHA-256. Raises DataError: a path cannot be read.
    """
    sources = [_source_cache_key(source, hash_of) for source in list_sources(data, "calibration")]
    key: dict[str, object] = {"reader": READER_VERSION, "sources": sources}
    if data.heldout_path is not None:
        key["heldout"] = [_source_cache_key(source, hash_of) for source in list_sources(data, "heldout")]
    return key


def _source_cache_key(source: Source, hash_of: Callable[[Path], str]) -> object:
    template = [hash_of(file)] if (file := find_template_file(source)) else []
    if source.kind == "text":  # the kind decides how a file is read
        return template + [hash_of(file) + find_kind(file) for file in list_files(source)]
    if source.kind == "hub":
        folder = Path(str(source.name))
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        return [hash_of(file) for file in files] if folder.is_dir() else find_commit(source)
    sizes = sorted((name, path.stat().st_size) for name, path in list_modules().items())
    return [sys.version.split()[0], hashlib.sha256(repr(sizes).encode()).hexdigest()]


def calibration_cache_key(
    data: DataConfig, key: dict[str, object], recall: Callable[[str, Callable[[], str]], str]
) -> dict[str, object]:
    """What the calibration text depends on: `key` of `data_cache_key`, but of held-out files only what they exclude.

    So another held-out text changes no result of a stage that does not read it. `recall(question, find)` returns an
    earlier answer, or finds and keeps it: all documents have to be read.
    """
    sources = list_sources(data, "calibration")
    if data.heldout_path is None or any(source.kind == "hub" for source in sources):
        return key
    question = json.dumps([key, asdict(replace(calibration_only(data), tokens=0))], sort_keys=True)
    try:
        excluded = recall(hashlib.sha256(question.encode()).hexdigest(), lambda: _hash_copies(data, sources))
    except DataError:  # maybe of a record that no stage reads
        return key
    return {**key, "heldout": excluded}


def _hash_copies(data: DataConfig, sources: list[Source]) -> str:
    """Hash of the documents of the sources that are also in the held-out text; empty if there are none."""
    heldout = {document.digest for source in list_sources(data, "heldout") for document in read_documents(source)}
    copies = heldout.intersection(document.digest for source in sources for document in read_documents(source))
    return hashlib.sha256(b"".join(sorted(copies))).hexdigest() if copies else ""
