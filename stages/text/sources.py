"""Documents of local files, of the hub or of the standard library."""

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from instruments.errors import DataError
from models.checkpoint.folder import expand_user
from stages.text.config import PLAIN_TEMPLATE, DataConfig, Source, Split, list_sources
from stages.text.documents import Document, bound_documents, cut_passages, interleave, read_record, take_share
from stages.text.hub import read_hub
from stages.text.python_stdlib import read_stdlib

SUFFIXES = (".jsonl", ".txt")
# A .txt document ends at the first blank line after this many characters ...
SHORTEST_PASSAGE = 2_000
# ... or at the first line end after this many.
LONGEST_PASSAGE = 8_000
# Files of a folder that are interleaved; limits the number of open files.
FILES_AT_ONCE = 64
# Maximum bytes of a .txt line; longer lines are cut.
MAX_LINE = 2**16


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


def list_files(source: Source) -> list[Path]:
    """The file that the source names, or the sorted .jsonl and .txt files of its folder and the subfolders.

    Raises:
        DataError: the path may not be read, or there is no such file.
    """
    path, where = (
        expand_user(str(source.path)),
        f"{source.path_setting}={source.path}, from working folder {Path.cwd()}",
    )
    try:
        found = path.rglob("*") if path.is_dir() else [path]
        files = sorted(file for file in found if file.suffix.lower() in SUFFIXES and file.is_file())
    except PermissionError as error:
        what = f"cannot read {error.filename}: {error.strerror}"
        raise DataError(what, where=where, do="check its permissions") from error
    if not files:
        do = f"{source.path_setting}=FILE_OR_FOLDER; other formats: data=hub data.name=FOLDER"
        raise DataError(f"{path} is no .jsonl or .txt file, and no folder that holds one", where=where, do=do)
    return files


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


def read_files(source: Source) -> Iterator[Document]:
    """The documents of a file, or of a folder's files in turn. Raises DataError."""
    files = list_files(source)
    groups = (files[start : start + FILES_AT_ONCE] for start in range(0, len(files), FILES_AT_ONCE))
    return (document for group in groups for document in interleave(read_file(file, source) for file in group))


def read_file(file: Path, source: Source) -> Iterator[Document]:
    """The documents of one .jsonl or .txt file, lazily. Raises DataError."""
    try:
        if file.suffix.lower() == ".jsonl":
            yield from _read_records(file, source)
        else:
            passages = cut_passages(_read_lines(file), SHORTEST_PASSAGE, LONGEST_PASSAGE)
            yield from (Document(f"{file}:{number}", text) for number, text in passages)
    except OSError as error:
        what = f"cannot read the file: {error.strerror}"
        raise DataError(what, where=str(file), do="check its permissions") from error


def _read_records(file: Path, source: Source) -> Iterator[Document]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where, text = f"{file}:{number}", _decode(line, f"{file}:{number}")
            if not text.strip():
                continue
            try:
                record = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise DataError(f"not a JSON record: {error}", where=where, do="correct or remove the line") from error
            if document := read_record(record, where, source):
                yield document


def _read_lines(file: Path) -> Iterator[str]:
    """The lines of a text file; a line of more than MAX_LINE bytes is cut."""
    rest = b""
    with file.open("rb") as lines:
        for number in count(1):
            line = rest + lines.readline(MAX_LINE - len(rest))
            if not line:
                return
            rest = b""
            if len(line) == MAX_LINE and not line.endswith(b"\n"):
                line, rest = _cut_line(line)
            yield _decode(line, f"{file}:{number}").replace("\r\n", "\n")


def _cut_line(line: bytes) -> tuple[bytes, bytes]:
    """Split a line into a part and the rest: after a space near the end, else between two characters."""
    last = line.rfind(b" ", len(line) - 1024) + 1
    if not last:
        last = len(line)
        while last > len(line) - 4 and line[last - 1] & 0xC0 == 0x80:  # within a character
            last -= 1
        last -= line[last - 1] >= 0xC0
    return line[:last], line[last:]


def _decode(line: bytes, where: str) -> str:
    """The text of a line. Raises DataError: it is not UTF-8; English in UTF-16 is valid UTF-8 with many zeros."""
    try:
        if line.count(0) <= len(line) // 3:
            return line.decode("utf-8-sig")
        fault = "many bytes are zero"
    except UnicodeDecodeError as error:
        fault = str(error)
    do = "convert the file to UTF-8, e.g. iconv -f latin1 -t utf-8; files of Windows: iconv -f utf-16 -t utf-8"
    raise DataError(f"not UTF-8: {fault}", where=where, do=do)
