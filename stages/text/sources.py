"""Documents of local files, of the hub or of the standard library."""

import json
import unicodedata
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path

from instruments.errors import DataError
from models.checkpoint.folder import expand_user
from stages.text.config import STDLIB, DataConfig
from stages.text.documents import (
    Document,
    Split,
    bound_documents,
    cut_passages,
    interleave,
    leave_out_copies,
    read_record,
    take_share,
)
from stages.text.hub import read_hub
from stages.text.python_stdlib import read_stdlib

SUFFIXES = (".jsonl", ".txt")
# A .txt document ends at the first blank line after this many characters ...
SHORTEST_PASSAGE = 2_000
# ... or at the first line end after this many.
LONGEST_PASSAGE = 8_000
# Files of a folder that are interleaved; limits the number of open files.
FILES_AT_ONCE = 64
# Maximum bytes of a record: 8 MiB of JSON can take 200 MiB of memory.
MAX_RECORD = 2**23
# Maximum bytes of a .txt line; longer lines are cut.
MAX_LINE = 2**16


def read_text(data: DataConfig, split: Split) -> Iterator[Document]:
    """The documents of one split of local files, lazily.

    With a held-out path, the splits are the two paths; calibration excludes documents that are also in the held-out
    text. Without one, `heldout_share` of the documents is held out, chosen by content.
    Raises DataError: a path or a record cannot be read.
    """
    if data.heldout_path is None:
        return take_share(read_files(str(data.path), "data.path", data), split, data.heldout_share)
    heldout = read_files(data.heldout_path, "data.heldout_path", data)
    return heldout if split == "heldout" else leave_out_copies(read_files(str(data.path), "data.path", data), heldout)


def list_files(path: str, option: str) -> list[Path]:
    """The file itself, or the sorted .jsonl and .txt files of a folder and its subfolders.

    Raises:
        DataError: the path does not exist or may not be read, or is no such file and no folder that holds one.
    """
    found, where = expand_user(path), f"{option}={path}"
    try:
        folder, file = found.is_dir(), found.is_file()
        files = [one for one in found.rglob("*") if one.suffix.lower() in SUFFIXES and one.is_file()] if folder else []
    except PermissionError as error:
        what = f"cannot read {error.filename}: {error.strerror}"
        raise DataError(what, where=where, do="check its permissions") from error
    if folder and not files:
        raise DataError("the folder holds no .jsonl and no .txt file", where=where, do=f"{option}=another folder")
    if not folder and not file:
        where = f"{option}, from working folder {Path.cwd()}"
        raise DataError(f"no file and no folder {path}", where=where, do=f"{option}=an existing path")
    if file and found.suffix.lower() not in SUFFIXES:
        do = "a .jsonl or .txt file; other formats: data=hub data.name=their folder"
        raise DataError(f"cannot read a {found.suffix or 'suffixless'} file", where=where, do=do)
    files = sorted(files) if folder else [found]
    for one in files:
        # Tables, reports and records are UTF-8 and could not hold such a name.
        if any(unicodedata.category(character) in {"Cc", "Cs"} for character in str(one)):
            what = "the name of a file is not UTF-8, or holds a line break or another control character"
            raise DataError(what, where=f"{option}, {str(one)!a}", do="rename it")
    return files


def read_files(path: str, option: str, data: DataConfig) -> Iterator[Document]:
    """The documents of a file, or of a folder's files in turn. Raises DataError; for a wrong path immediately."""
    files = list_files(path, option)
    groups = (files[start : start + FILES_AT_ONCE] for start in range(0, len(files), FILES_AT_ONCE))
    return (document for group in groups for document in interleave(read_file(file, data) for file in group))


def read_file(file: Path, data: DataConfig) -> Iterator[Document]:
    """The documents of one .jsonl or .txt file, lazily. Raises DataError."""
    if file.suffix.lower() == ".jsonl":
        return _read_records(file, data)
    passages = cut_passages(_read_lines(file, MAX_LINE), SHORTEST_PASSAGE, LONGEST_PASSAGE)
    return (Document(f"{file}:{number}", text) for number, text in passages)


def _read_records(file: Path, data: DataConfig) -> Iterator[Document]:
    for number, line in enumerate(_read_lines(file, MAX_RECORD, whole=True), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            character = f", character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else ""
            why = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            what = f"not a JSON record: {'it is nested too deeply' if isinstance(error, RecursionError) else why}"
            raise DataError(what, where=f"{file}:{number}{character}", do="correct or remove the line") from error
        if document := read_record(record, f"{file}:{number}", data):
            yield document


def _read_lines(file: Path, longest: int, *, whole: bool = False) -> Iterator[str]:
    """The lines of a file; a line of more than `longest` bytes is cut, or refused if `whole`."""
    rest = b""
    try:
        with file.open("rb") as lines:
            for number in count(1):
                line = rest + lines.readline(longest - len(rest))
                if not line:
                    return
                rest = b""
                if len(line) == longest and not line.endswith(b"\n"):
                    if whole:
                        raise _too_long(f"{file}:{number}")
                    line, rest = _cut_line(line)
                yield _decode(line, f"{file}:{number}").replace("\r\n", "\n")
    except OSError as error:
        raise DataError(
            f"cannot read the file: {error.strerror}", where=str(file), do="check its permissions"
        ) from error


def _too_long(where: str) -> DataError:
    what = f"a record is longer than {MAX_RECORD // 2**20} MiB"
    do = "several records, one a line; or plain text in a .txt file, which may have lines of any length"
    return DataError(what, where=where, do=do)


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
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        own = "utf-16" if line.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) else "latin1"
        what = f"not UTF-8: byte {error.start + 1} of the line is 0x{line[error.start]:02x}"
        raise DataError(what, where=where, do=f"convert the file to UTF-8, e.g. iconv -f {own} -t utf-8") from error
    zeros = line.count(0)
    if len(line) > 8 and len(line) // 3 < zeros <= len(line) // 2 + 1:  # English in UTF-16 without mark is valid UTF-8
        what = f"no text in UTF-8: {zeros} of {len(line)} bytes of the line are zero"
        do = "remove the file, or convert it to UTF-8, e.g. iconv -f utf-16le -t utf-8"
        raise DataError(what, where=where, do=do)
    return text


def read_documents(data: DataConfig, split: Split) -> Iterator[Document]:
    """The documents of one split, lazily, always in the same order.

    Raises:
        DataError: the text cannot be read, or the labels need conversations and the calibration text is plain.
    """
    if data.kind in ("text", "mixture"):  # mixture: only for its data.heldout_path
        documents = read_text(data, split)
    elif data.kind == "hub":
        documents = read_hub(data, split)
    else:
        documents = read_stdlib(data.heldout_share, split)
    documents = bound_documents(documents)
    return require_conversations(documents) if split == "calibration" and data.labels == "completion" else documents


def require_conversations(documents: Iterable[Document]) -> Iterator[Document]:
    """Pass conversations on. Raises DataError at the first plain text."""
    for document in documents:
        if not document.messages:
            what = "data.labels=completion needs conversations, and this is plain text"
            do = "data.labels=full_sequence, or name the column of the conversations: data.messages_column="
            raise DataError(what, where=document.name, do=do)
        yield document


def describe_source(data: DataConfig, split: Split) -> str:
    """The source of one split in words, for logs and errors."""
    heldout = split == "heldout"
    if data.kind in ("text", "mixture"):
        return str(data.heldout_path if heldout and data.heldout_path else data.path)
    if data.kind == "hub":
        return f"{data.name}[{data.heldout_split if heldout and data.heldout_split else data.split}]"
    return STDLIB


def describe_emptiness(data: DataConfig, split: Split) -> DataError:
    """The error for a split without documents."""
    where = f"{split} text of {describe_source(data, split)}"
    own_option = "heldout_split" if data.kind == "hub" else "heldout_path"
    if getattr(data, own_option) is None and data.heldout_share:
        return DataError(
            f"no document falls to the {split} text",
            where=f"{where}, data.heldout_share={data.heldout_share} of its documents held out",
            do=f"text with more documents, another data.heldout_share, or data.{own_option}= held-out text of its own",
        )
    if split == "calibration" and (data.kind == "text" or not data.heldout_share):
        source = "data.path" if data.heldout_path else "source"  # of a mixture
        return DataError(
            "no document is left for the calibration text: all of them also occur in the held-out text",
            where=f"{where}, data.heldout_path={data.heldout_path}" if data.heldout_path else where,
            do=f"another {source} or data.heldout_path",
        )
    return DataError("the text is empty", where=where, do="name text that holds something")
