"""Documents of local files, of the hub or of the standard library; files of chat templates."""

from collections.abc import Iterator
from pathlib import Path

from instruments.errors import DataError
from models.checkpoint.folder import expand_user
from stages.text.config import PLAIN_TEMPLATE, DataConfig, Source, Split, list_sources
from stages.text.documents import Document, bound_documents, take_share
from stages.text.files import read_files
from stages.text.hub import read_hub
from stages.text.python_stdlib import read_stdlib


def read_sources(data: DataConfig, role: Split) -> Iterator[tuple[Source, Iterator[Document]]]:
    """The sources of one split and their documents; calibration excludes the documents of `data.heldout_path`."""
    excluded: set[bytes] = set()
    if data.heldout_path is not None and role == "calibration":
        excluded = {document.digest for source in list_sources(data, "heldout") for document in read_documents(source)}
    for source in list_sources(data, role):
        yield source, (document for document in read_documents(source) if document.digest not in excluded)


def read_documents(source: Source) -> Iterator[Document]:
    """The documents of one source in one split, lazily, always in the same order.

    `heldout_share` of the documents (of the standard library: of the modules) is held out, chosen by content.

    Raises:
        DataError: the text cannot be read, or the labels need conversations and the calibration text is plain.
    """
    if source.kind == "python_stdlib":
        documents = read_stdlib(source.heldout_share, source.role)
    else:
        read = read_hub(source) if source.kind == "hub" else read_files(source)
        documents = take_share(read, source.role, source.heldout_share)
    for document in bound_documents(documents):
        if source.labels == "completion" and source.role == "calibration" and not document.messages:
            what = f"{source.place}.labels=completion needs conversations, and this is plain text"
            do = f"{source.place}.labels=full_sequence, or their column: {source.place}.messages_column="
            raise DataError(what, where=document.name, do=do)
        yield document


def describe_emptiness(source: Source) -> DataError:
    """The error for a source without a document in its split."""
    what, where = f"no document is left for the {source.role} text", f"{source.role} text of {source.title}"
    do = f"text with more documents, another {source.place}.heldout_share, or other held-out text"
    return DataError(what, where=f"{where}, {source.place}.heldout_share={source.heldout_share}", do=do)


def find_template_file(source: Source) -> Path | None:
    """The file that `chat_template` names; None: it names none. Raises DataError: a path without a file."""
    name = source.chat_template
    if name is None or name == PLAIN_TEMPLATE:
        return None
    if (path := expand_user(name)).is_file():
        return path
    if path.name == name and not path.suffix:
        return None
    setting = f"{source.place}.chat_template"
    do = f"{setting}=FILE, {setting}={PLAIN_TEMPLATE}, or the name of one of the tokenizer's templates"
    raise DataError(f"there is no file {path}", where=f"setting {setting}, from working folder {Path.cwd()}", do=do)


def read_template(file: Path, source: Source) -> str:
    """The chat template in a file. Raises DataError: it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        where, do = f"setting {source.place}.chat_template", "a file of UTF-8 text that may be read"
        raise DataError(f"cannot read the chat template {file}: {error}", where=where, do=do) from error
