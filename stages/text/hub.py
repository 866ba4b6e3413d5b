"""Datasets of the Hugging Face hub, streamed."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from zlib import error as zlib_error

from huggingface_hub import constants, hf_hub_download
from huggingface_hub.errors import HFValidationError, HTTPError
from huggingface_hub.file_download import repo_folder_name

from instruments.errors import DataError, some
from models.source import CONNECT, hub_answers, offline_by_choice
from stages.text.config import Source
from stages.text.documents import Document, read_record, without_filled

# Remedy when the hub does not answer.
WITHOUT_HUB = "text of local files, or of Python's standard library: data=python_stdlib"
# What `datasets` raises for damaged and hostile files, a lost connection, and a folder that requires its own code.
UNREADABLE = (HTTPError, OSError, ValueError, TypeError, EOFError, RuntimeError, ImportError, zlib_error)


def read_hub(source: Source) -> Iterator[Document]:
    """The documents of one split of a dataset, lazily.

    Raises DataError: the dataset cannot be reached or read, or a record has no text.
    """
    # Imported here: both packages are slow to import, and datasets is an optional extra.
    from datasets import load_dataset_builder  # noqa: PLC0415
    from datasets.exceptions import DatasetsError  # noqa: PLC0415
    from pyarrow import ArrowException  # noqa: PLC0415

    try:
        builder = load_dataset_builder(str(source.name), source.subset, revision=source.revision)
        _refuse_local_files(builder.config.data_files or {}, source)
        splits = builder.as_streaming_dataset()
        # Both splits are checked when the first is read: evaluation is too late to report a wrong held-out split.
        if missing := {source.split, source.heldout_split or source.split} - splits.keys():
            what, place = f"the dataset has no split {' and no split '.join(sorted(missing))}", source.place
            do = f"{place}.split= and {place}.heldout_split= of: {', '.join(splits)}"
            raise DataError(what, where=_describe(source), do=do)
        for number, row in enumerate(splits[source.split], start=1):
            if document := read_record(without_filled(row), f"{source.title}:{number}", source):
                yield document
    except (DatasetsError, ArrowException, *UNREADABLE) as error:
        do = f"check these names and the network; without one: {WITHOUT_HUB}"
        raise DataError(f"cannot read the dataset: {error}", where=_describe(source), do=do) from error


def _refuse_local_files(files: Mapping[str, Iterable[str]], source: Source) -> None:
    """Raise DataError: the dataset's README names files of this machine outside of its folder."""
    named = [file.rpartition("::")[2] for split in files.values() for file in split]  # behind ::, of an archive
    local = [file for file in named if not file.startswith(("hf://", "http://", "https://"))]
    folder = os.path.abspath(str(source.name))  # noqa: PTH100 - a downloaded data set consists of links to a cache
    if outside := [file for file in local if not os.path.abspath(file).startswith(f"{folder}{os.sep}")]:  # noqa: PTH100
        what = f"the dataset names files outside of its folder: {some(outside, 3)}"
        raise DataError(what, where=_describe(source), do="correct data_files in its README.md, or name these files")


def require_hub(sources: Iterable[Source]) -> None:
    """Fail early if the hub does not answer: `datasets` itself retries for half a minute.

    Does nothing in offline mode (cache) and for local folders. Raises DataError: the hub cannot be reached.
    """
    for source in sources:
        remote = source.kind == "hub" and not Path(str(source.name)).is_dir()
        if remote and not offline_by_choice() and not hub_answers():
            what = f"the hub cannot be reached at {constants.ENDPOINT}, and the dataset is streamed from it"
            raise DataError(what, where=_describe(source), do=f"{CONNECT}, or {WITHOUT_HUB}")


def find_commit(source: Source) -> str | None:
    """Current commit of the dataset's revision, from the cache if the hub does not answer; None: unknown."""
    name, offline = str(source.name), not hub_answers()
    with suppress(HTTPError, HFValidationError, OSError):
        # Any file does, also a missing one: with the hub's answer, the cache stores the commit.
        hf_hub_download(name, ".gitattributes", repo_type="dataset", revision=source.revision, local_files_only=offline)
    folder = repo_folder_name(repo_id=name, repo_type="dataset")
    known = Path(constants.HF_HUB_CACHE, folder, "refs", source.revision or constants.DEFAULT_REVISION)
    return known.read_text(encoding="utf-8") if known.is_file() else source.revision


def _describe(source: Source) -> str:
    place = source.place
    return f"{place}.name={source.name}, {place}.subset={source.subset}, {place}.revision={source.revision}"
