"""Documents of local files, of the hub or of the standard library, and what they depend on; files of chat templates."""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from instruments.errors import DataError, some
from instruments.files import hash_file
from models.checkpoint.folder import expand_user
from stages.text.config import PLAIN_TEMPLATE, DataConfig, Source, Split, calibration_only, list_sources
from stages.text.documents import Document, bound_documents, take_share
from stages.text.files import find_kind, list_files, read_files
from stages.text.hub import find_commit, read_hub
from stages.text.python_stdlib import list_modules, read_stdlib


def read_sources(data: DataConfig, role: Split) -> Iterator[tuple[Source, Iterator[Document]]]:
    """The sources of one split and their documents; calibration excludes those held out, and of `data.heldout_path`."""
    sources = list_sources(data, role)
    excluded: set[bytes] = set()
    if role == "calibration" and data.heldout_path is not None:
        heldout = list_sources(data, "heldout")
        excluded = {document.digest for source in heldout for document in read_documents(source)}
    for source in sources:
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
    what, where = f"no document is left for the {source.use} text", f"{source.use} text of {source.title}"
    if source.without_text:
        what += f", and {len(source.without_text)} records have their text in other columns"
        do = f"name one of them: {source.place}.text_column= or {source.place}.messages_column="
        return DataError(what, where=f"{where}: {some(source.without_text, 3)}", do=do)
    share = f"{source.place}.heldout_share{'' if source.place == 'data' else ' (the largest of the mixture counts)'}"
    do = f"text with more documents, another {share}, or other held-out text"
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


def describe_missing_template(source: Source, where: str) -> DataError:
    """The error for conversations of a model without a chat template."""
    what = f"the {source.use} text is conversations, and the tokenizer has no chat template to render them with"
    setting = f"{source.place}.chat_template"
    do = f"an instruction-tuned model, {setting}={PLAIN_TEMPLATE} or =FILE, or plain text: data.text_column="
    return DataError(what, where=where, do=do)


def read_template(file: Path, source: Source) -> str:
    """The chat template in a file. Raises DataError: it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        where, do = f"setting {source.place}.chat_template", "a file of UTF-8 text that may be read"
        raise DataError(f"cannot read the chat template {file}: {error}", where=where, do=do) from error


# Incremented when a change of the readers gives other tokens for the same text.
READER_VERSION = 11


def data_cache_key(data: DataConfig, hash_of: Callable[[Path], str] = hash_file) -> dict[str, object]:
    """What the token sequences depend on in addition to the settings, as JSON; equal for equal text.

    Contains the hash of each local file, the Python version and module sizes of the standard library, or the
    commit of a dataset of the hub; `hash_of` gives a file's SHA-256. Raises DataError: a path cannot be read.
    """
    read = list_sources(data, "calibration")
    key: dict[str, object] = {"reader": READER_VERSION, "sources": [_source_cache_key(one, hash_of) for one in read]}
    if data.heldout_path is not None:
        key["heldout"] = [_source_cache_key(source, hash_of) for source in list_sources(data, "heldout")]
    return key


def _source_cache_key(source: Source, hash_of: Callable[[Path], str]) -> object:
    text = _text_cache_key(source, hash_of)
    template = None if source.kind == "python_stdlib" else find_template_file(source)
    return {"text": text, "template": hash_of(template)} if template else text


def _text_cache_key(source: Source, hash_of: Callable[[Path], str]) -> object:
    if source.kind == "text":  # the kind decides how a file is read
        return [hash_of(file) + find_kind(file) for file in list_files(source)]
    if source.kind == "hub":
        folder = Path(str(source.name))
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        # Names decide which split a file belongs to.
        named = [f"{file.relative_to(folder).as_posix()} {hash_of(file)}" for file in files]
        return named if folder.is_dir() else find_commit(source)
    sizes = sorted((name, path.stat().st_size) for name, path in list_modules().items())
    return [sys.version.split()[0], hashlib.sha256(repr(sizes).encode()).hexdigest()]


def calibration_cache_key(
    data: DataConfig, key: dict[str, object], recall: Callable[[str, Callable[[], str]], str]
) -> dict[str, object]:
    """What the calibration text depends on: `key` of `data_cache_key`, but of held-out files only what they exclude.

    So another held-out text changes no result of a stage that does not read it. `recall(question, find)` returns an
    earlier answer, or finds and keeps it: all documents have to be read. Raises DataError: no readable held-out text.
    """
    sources = list_sources(data, "calibration")
    if data.heldout_path is None or any(source.kind == "hub" for source in sources):
        return key
    question = json.dumps([key, asdict(replace(calibration_only(data), tokens=0))], sort_keys=True)
    excluded = recall(hashlib.sha256(question.encode()).hexdigest(), lambda: _hash_copies(data, sources))
    alone = {name: value for name, value in key.items() if name != "heldout"}
    return {**alone, "heldout": excluded} if excluded else alone


def _hash_copies(data: DataConfig, sources: list[Source]) -> str:
    """Hash of the documents of the sources that are also in the held-out text; empty if there are none."""
    heldout = {document.digest for source in list_sources(data, "heldout") for document in read_documents(source)}
    copies: set[bytes] = set()
    for source in sources:
        with suppress(DataError):  # no stage reads behind a record that cannot be read
            copies.update(document.digest for document in read_documents(source) if document.digest in heldout)
    return hashlib.sha256(b"".join(sorted(copies))).hexdigest() if copies else ""
