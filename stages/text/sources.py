"""Which reader a configuration names."""

from collections.abc import Iterable, Iterator

from instruments.errors import DataError
from stages.text.config import DataConfig
from stages.text.documents import Document, Split
from stages.text.hub import read_hub
from stages.text.local_files import read_text
from stages.text.python_stdlib import read_stdlib


def read_documents(data: DataConfig, split: Split) -> Iterator[Document]:
    """The documents of one split, lazily, always in the same order.

    Raises:
        DataError: the text cannot be read, or the labels need conversations and the calibration text is plain.
    """
    if data.kind == "text":
        documents = read_text(data, split)
    elif data.kind == "hub":
        documents = read_hub(data, split)
    else:
        documents = read_stdlib(data.heldout_share, split)
    return require_conversations(documents) if split == "calibration" and data.labels == "completion" else documents


def require_conversations(documents: Iterable[Document]) -> Iterator[Document]:
    """Pass conversations on. Raises DataError at the first plain text."""
    for document in documents:
        if not document.messages:
            raise DataError(
                "data.labels=completion needs conversations, and this is plain text",
                where=document.name,
                do="data.labels=full_sequence, or name the column of the conversations: data.messages_column=",
            )
        yield document


def describe_source(data: DataConfig, split: Split) -> str:
    """The source of one split in words, for logs and errors."""
    heldout = split == "heldout"
    if data.kind == "text":
        return str(data.heldout_path if heldout and data.heldout_path else data.path)
    if data.kind == "hub":
        return f"{data.name}[{data.heldout_split if heldout and data.heldout_split else data.split}]"
    return "the Python standard library"


def describe_emptiness(data: DataConfig, split: Split) -> DataError:
    """The error of a split without a document."""
    where = f"{split} text of {describe_source(data, split)}"
    own_option = "heldout_split" if data.kind == "hub" else "heldout_path"
    if getattr(data, own_option) is None:
        return DataError(
            f"no document falls to the {split} text",
            where=f"{where}, data.heldout_share={data.heldout_share} of its documents held out",
            do=f"text with more documents, another data.heldout_share, or data.{own_option}= held-out text of its own",
        )
    if split == "calibration" and data.kind == "text":
        return DataError(
            "no document is left for the calibration text: all of them also occur in the held-out text",
            where=f"{where}, data.heldout_path={data.heldout_path}",
            do="another data.path or data.heldout_path",
        )
    return DataError("the text is empty", where=where, do="name text that holds something")
