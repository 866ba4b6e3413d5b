"""Datasets of the Hugging Face hub, streamed: no more is fetched than is read."""

from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from models.errors import DataError
from stages.data.config import DataConfig
from stages.data.document import Document, Split
from stages.data.heldout import take_share
from stages.data.records import read_record

# Seconds to wait for the hub before saying that it cannot be reached; `datasets` alone retries for half a minute.
HUB_TIMEOUT = 10.0


def read_hub(data: DataConfig, split: Split) -> Iterator[Document]:
    """The documents of one split of a dataset, lazily.

    With a held-out split the two are those the dataset's publisher made. Without one, `heldout_share` of the documents
    is held out, chosen by content.

    Raises:
        DataError: `datasets` is not installed, the dataset cannot be reached or read, or a record has no text.
    """
    if data.heldout_split is None:
        return take_share(_read_split(data, data.split), split, data.heldout_share)
    return _read_split(data, data.heldout_split if split == "heldout" else data.split)


def describe_missing_package() -> DataError:
    """The error of an installation without the optional extra."""
    return DataError(
        "reading a dataset needs the package datasets", where="data.kind=hub", do="pip install 'tiny-onn[hub]'"
    )


def _read_split(data: DataConfig, split: str) -> Iterator[Document]:
    for number, row in enumerate(_stream_rows(data, split), start=1):
        if document := read_record(row, f"{data.name}[{split}]:{number}", data, domain=str(data.name)):
            yield document


def _stream_rows(data: DataConfig, split: str) -> Iterator[object]:
    # Imported here: both take a while to import, and datasets is an optional extra.
    try:
        from datasets import load_dataset  # noqa: PLC0415
        from datasets.exceptions import DatasetsError  # noqa: PLC0415
    except ImportError as error:
        raise describe_missing_package() from error
    try:
        _reach_hub(data)
        splits = load_dataset(data.name, data.subset, revision=data.revision, streaming=True)
        _require_splits(list(splits), data)
        yield from splits[split]
    except (DatasetsError, OSError, ValueError) as error:
        raise DataError(
            f"cannot read the dataset: {error}",
            where=_name_dataset(data),
            do="check these names and the network; without one: data=python_stdlib, or data=text data.path=a file",
        ) from error


def _reach_hub(data: DataConfig) -> None:
    """Fail soon where the hub cannot be reached; offline mode and local folders need no hub. Raises OSError."""
    from huggingface_hub import constants  # noqa: PLC0415

    if constants.HF_HUB_OFFLINE or Path(str(data.name)).is_dir():
        return
    try:
        urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=HUB_TIMEOUT).close()
    except HTTPError as answer:
        answer.close()


def _require_splits(splits: list[str], data: DataConfig) -> None:
    """Look for both splits when the first is read: a wrong held-out split must not show up only in evaluation."""
    missing = [wanted for wanted in (data.split, data.heldout_split) if wanted is not None and wanted not in splits]
    if missing:
        raise DataError(
            f"the dataset has no split {' and no split '.join(missing)}",
            where=_name_dataset(data),
            do=f"data.split= and data.heldout_split= of: {', '.join(splits)}",
        )


def _name_dataset(data: DataConfig) -> str:
    return f"data.name={data.name}, data.subset={data.subset}, data.revision={data.revision}"
