"""Datasets of the Hugging Face hub, streamed."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from zlib import error as zlib_error

from huggingface_hub import constants, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.file_download import repo_folder_name

from instruments.errors import DataError
from models.source import CONNECT, hub_answers, offline_by_choice
from stages.text.config import DataConfig, list_sources
from stages.text.documents import Document, Split, read_record, take_share

# Limits on rows per block and on memory growth in bytes: a file of kilobytes can unpack to gigabytes.
ROWS_AT_ONCE = 64
MAX_GROWTH = 2**29


def read_hub(data: DataConfig, split: Split) -> Iterator[Document]:
    """The documents of one split of a dataset, lazily.

    With `heldout_split`, both splits are the publisher's. Without it, `heldout_share` of the documents is held out,
    chosen by content.
    Raises DataError: `datasets` is not installed, the dataset cannot be reached or read, or a record has no text.
    """
    if data.heldout_split is None:
        return take_share(_read_split(data, data.split), split, data.heldout_share)
    return _read_split(data, data.heldout_split if split == "heldout" else data.split)


def describe_missing_package() -> DataError:
    """The error for a missing package `datasets`."""
    return DataError(
        "reading a dataset needs the package datasets", where="data.kind=hub", do="pip install -e '.[hub]'"
    )


def _read_split(data: DataConfig, split: str) -> Iterator[Document]:
    for number, row in enumerate(_stream_rows(data, split), start=1):
        if document := read_record(row, f"{data.name}[{split}]:{number}", data):
            yield document


def _stream_rows(data: DataConfig, split: str) -> Iterator[object]:
    # Imported here: both packages are slow to import, and datasets is an optional extra.
    try:
        from datasets import load_dataset_builder  # noqa: PLC0415
        from datasets.exceptions import DatasetsError  # noqa: PLC0415
        from pyarrow import ArrowException  # noqa: PLC0415
    except ImportError as error:
        raise describe_missing_package() from error
    require_hub(data)
    try:
        with bounded_memory(MAX_GROWTH):  # the builder reads the first rows to infer types
            builder = load_dataset_builder(data.name, data.subset, revision=data.revision)
            if hasattr(builder.config, "batch_size"):  # Parquet; the default is the row count that the file states
                builder.config.batch_size = ROWS_AT_ONCE
            splits = builder.as_streaming_dataset()
        _require_splits(list(splits), data)
        rows = iter(splits[split])
        while True:
            with bounded_memory(MAX_GROWTH):
                row = next(rows, None)
            if row is None:
                return
            yield row
    except MemoryError as error:
        what = f"a record or a block of records unpacks to more than {MAX_GROWTH // 2**20} MiB"
        do = "a dataset of smaller records; or data=text data.path= of its text in .jsonl or .txt files"
        raise DataError(what, where=_name_dataset(data), do=do) from error
    # The last five come from readers of damaged or hostile files, and from a folder that requires its own code.
    except (DatasetsError, OSError, ValueError, ArrowException, TypeError, EOFError, RuntimeError, zlib_error) as error:
        what = f"cannot read the dataset: {error}"
        do = "check these names and the network; without one: data=python_stdlib, or data=text data.path=a file"
        raise DataError(what, where=_name_dataset(data), do=do) from error


@contextmanager
def bounded_memory(growth: int) -> Iterator[None]:
    """Limit the growth of this process's data segment to `growth` bytes, else MemoryError. Linux only."""
    status = Path("/proc/self/status")
    if not status.exists():
        yield
        return
    used = next(
        int(line.split()[1]) * 1024
        for line in status.read_text(encoding="utf-8").splitlines()
        if line.startswith("VmData")
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [used + growth, *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def require_hub(data: DataConfig) -> None:
    """Fail early if the hub does not answer: `datasets` itself retries for half a minute.

    Does nothing in offline mode (cache) and for local folders. Raises DataError: the hub cannot be reached.
    """
    for source in list_sources(data):
        require_hub(source.data)
    if data.kind != "hub" or offline_by_choice() or Path(str(data.name)).is_dir() or hub_answers():
        return
    what = f"the hub cannot be reached at {constants.ENDPOINT}, and the dataset is streamed from it"
    do = f"{CONNECT}, or data=python_stdlib, or data=text data.path=<your files>"
    raise DataError(what, where=_name_dataset(data), do=do)


def find_commit(data: DataConfig) -> str | None:
    """Current commit of the dataset's revision, from the cache if the hub does not answer; None: unknown."""
    offline, name = not hub_answers(), str(data.name)
    with suppress(HfHubHTTPError, HFValidationError, OSError):
        # Most repositories have this file; the cache stores it in a folder named after the commit.
        cached = hf_hub_download(
            name, ".gitattributes", repo_type="dataset", revision=data.revision, local_files_only=offline
        )
        return Path(cached).parent.name
    # The hub's answer for a missing file also names the commit, and the cache stores it.
    folder = repo_folder_name(repo_id=name, repo_type="dataset")
    kept = Path(constants.HF_HUB_CACHE, folder, "refs", data.revision or constants.DEFAULT_REVISION)
    return kept.read_text(encoding="utf-8") if kept.is_file() else None


def _require_splits(splits: list[str], data: DataConfig) -> None:
    """Check both splits when the first is read: evaluation is too late to report a wrong held-out split."""
    missing = [wanted for wanted in (data.split, data.heldout_split) if wanted is not None and wanted not in splits]
    if missing:
        what = f"the dataset has no split {' and no split '.join(missing)}"
        do = f"data.split= and data.heldout_split= of: {', '.join(splits)}"
        raise DataError(what, where=_name_dataset(data), do=do)


def _name_dataset(data: DataConfig) -> str:
    return f"data.name={data.name}, data.subset={data.subset}, data.revision={data.revision}"
