"""Documents of local files: plain text, and tables of records."""

import csv
import gzip
import importlib.util
import io
import json
import logging
import os
import re
import stat
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from errno import ENOENT
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from instruments.errors import DataError, some
from models.checkpoint.folder import expand_user
from stages.text.config import Source
from stages.text.documents import Document, cut_passages, interleave, read_record, without_filled

logger = logging.getLogger(__name__)

TEXT = (".txt", ".md")
RECORDS = (".jsonl", ".json", ".csv", ".parquet")
COMPRESSED = (".gz", ".zst")
# Data that is not read; beside files that are, it is an error, as are other files of more bytes than those.
UNREAD = frozenset(
    {".tsv", ".arrow", ".feather", ".xml", ".html", ".pdf", ".docx", ".zip", ".tar", ".bz2", ".xz", *COMPRESSED}
)
# Files about the data, left out of a folder that has others.
ABOUT = re.compile(r"(readme|licen[cs]e|notice|copying|changelog|contributing|dataset_infos?)\b", re.IGNORECASE)
# A text document ends at the first blank line after this many characters ...
SHORTEST_PASSAGE = 2_000
# ... or at the first line end after this many.
LONGEST_PASSAGE = 8_000
# Files of a folder that are interleaved; limits the number of open files.
FILES_AT_ONCE = 64
# Maximum bytes of a line of text; longer lines are cut.
MAX_LINE = 2**16
# Maximum bytes of a record, and of a .json file; more is an error.
MAX_RECORD, MAX_JSON = 2**26, 2**29


def list_files(source: Source) -> list[Path]:
    """The files that the source names, or the sorted files of its folders and subfolders that can be read, each once.

    Hidden files and those whose name begins with `__` are left out, and files about the data (README, LICENSE ...).

    Raises:
        DataError: a path may not be read, there is no file that can be read, or other data beside those.
    """
    names = source.paths or [str(source.path)]
    files = (file for name in names for file in _list_files(expand_user(name), f"{source.path_setting}={name}", source))
    once: dict[str, Path] = {}
    for file in files:
        once.setdefault(os.path.realpath(file), file)
    return [*once.values()]


def _list_files(path: Path, said: str, source: Source) -> list[Path]:
    where = f"{said}, from working folder {Path.cwd()}"
    try:
        files, _about, others = _sort_files(path)
    except OSError as error:
        what = f"cannot read {error.filename}: {error.strerror}"
        do = "remove the link, or mount what it names" if error.errno == ENOENT else "check its permissions"
        raise DataError(what, where=where, do=do) from error
    if files and others:
        what = f"the folder also holds data that is not read: {some(others)}"
        do = "move these files, or convert them"
        if source.path_setting == "data.path":
            do += ", or name those to read: data.path=null 'data.paths=[FILE,FILE]'"
        raise DataError(what, where=where, do=do)
    if not files:
        do = f"{source.path_setting}=FILE_OR_FOLDER of {', '.join((*TEXT, *RECORDS, *COMPRESSED))}"
        raise DataError(f"{path} is no file that can be read as text, and no folder that holds one", where=where, do=do)
    return files


def _sort_files(path: Path) -> tuple[list[Path], list[Path], list[str]]:
    """The files that are read, those that are left out, and names of other data. Raises OSError."""
    if not path.is_dir():
        return [path] if path.is_file() and find_kind(path) else [], [], []
    found = sorted(_visible_files(path))
    readable = [file for file in found if find_kind(file)]
    about = {file for file in readable if ABOUT.match(file.name) and file.suffix in {*TEXT, ".json"}}
    if len(about) == len(readable):  # a README alone is text
        about = set()
    read = [file for file in readable if file not in about]
    unread = others = [file for file in found if not find_kind(file)]
    unread_bytes, read_bytes = (sum(file.stat().st_size for file in files) for files in (unread, read))
    if unread_bytes <= read_bytes:
        others = [file for file in others if file.suffix.lower() in UNREAD]
    return read, [*sorted(about), *unread], [file.relative_to(path).as_posix() for file in others]


def _visible_files(folder: Path) -> Iterator[Path]:
    """Files that are not hidden, also behind links to folders. Raises OSError: a folder that is closed, a dead link."""

    def refuse(error: OSError) -> None:
        raise error

    seen: set[str] = set()
    for place, folders, files in os.walk(folder, followlinks=True, onerror=refuse):
        visible = (own := os.path.realpath(place)) not in seen
        seen.add(own)
        kept = (name for name in folders if visible and name != "lost+found" and not name.startswith((".", "__")))
        folders[:] = sorted(kept)
        for name in files if visible else ():
            file = Path(place, name)
            if not name.startswith((".", "__")) and stat.S_ISREG(file.stat().st_mode):
                yield file


def find_kind(file: Path) -> str:
    """The suffix by which a file is read, without that of its compression; empty if it is not read."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    read: tuple[str, ...] = (*TEXT, *RECORDS)
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
        read = (*TEXT, *RECORDS[:-1])  # Parquet is compressed inside
    return suffixes[-1] if suffixes and suffixes[-1] in read else ""


def describe_files(source: Source) -> str:
    """Numbers of the files by kind, and the names of those left out; empty for a single file."""
    sorted_files = [_sort_files(expand_user(name)) for name in source.paths or [str(source.path)]]
    once = {os.path.realpath(file): find_kind(file) for files, _left_out, _others in sorted_files for file in files}
    kinds, left_out = Counter(once.values()), [file.name for _files, files, _others in sorted_files for file in files]
    numbers = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
    without = f", without {some(left_out, separator=', ')}" if left_out else ""
    return f" ({numbers}{without})" if kinds.total() > 1 or left_out else ""


def read_files(source: Source) -> Iterator[Document]:
    """The documents of a file, or of a folder's files in turn. Raises DataError."""
    files = list_files(source)
    number = -(-len(files) // FILES_AT_ONCE)
    groups = (files[first::number] for first in range(number))  # each from all over the folder, which may be sorted
    return (document for group in groups for document in interleave(read_file(file, source) for file in group))


def read_file(file: Path, source: Source) -> Iterator[Document]:
    """The documents of one file, lazily. Raises DataError."""
    kind = find_kind(file)
    try:
        if kind == ".parquet":
            yield from _documents(_read_parquet(file), source)
            return
        with _open(file) as stream:
            if kind in TEXT:
                passages = cut_passages(_read_lines(file, stream), SHORTEST_PASSAGE, LONGEST_PASSAGE)
                yield from (Document(f"{file}:{number}", text) for number, text in passages)
            else:
                read = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv}[kind]
                yield from _documents(read(file, stream), source)
    except (OSError, EOFError, zlib.error) as error:
        what = f"cannot read the file: {getattr(error, 'strerror', None) or error}"
        raise DataError(what, where=str(file), do="check its permissions, and that it is whole") from error


def _documents(records: Iterable[tuple[str, Any]], source: Source) -> Iterator[Document]:
    """The documents of records with their places."""
    return (document for where, record in records if (document := read_record(record, where, source)))


def _open(file: Path) -> io.BufferedIOBase:
    if file.suffix.lower() == ".gz":
        return gzip.open(file)
    if file.suffix.lower() == ".zst":
        _require("pyarrow", file)
        import pyarrow  # noqa: PLC0415 - optional

        return io.BufferedReader(pyarrow.input_stream(file, compression="zstd"))
    return file.open("rb")


def _require(package: str, file: Path) -> None:
    if importlib.util.find_spec(package) is None:
        do = f"pip install {package}, or convert the file to .jsonl"
        raise DataError(f"reading this file needs the package {package}", where=str(file), do=do)


def _read_jsonl(file: Path, stream: io.BufferedIOBase) -> Iterator[tuple[str, Any]]:
    for number in count(1):
        line, where = stream.readline(MAX_RECORD + 1), f"{file}:{number}"
        if not line:
            return
        if len(line) > MAX_RECORD:
            raise DataError(
                f"a record has more than {MAX_RECORD >> 20} MiB", where=where, do="correct or remove the line"
            )
        if text := _decode(line, where).strip():
            yield where, _parse(text, where, "correct or remove the line")


def _read_json(file: Path, stream: io.BufferedIOBase) -> Iterator[tuple[str, Any]]:
    content = stream.read(MAX_JSON + 1)
    if len(content) > MAX_JSON:
        what, do = f"the file has more than {MAX_JSON >> 20} MiB", "convert it to .jsonl, which is read by the line"
        raise DataError(what, where=str(file), do=do)
    do = "correct the file, which is a list of records; with a record in every line, name it .jsonl"
    found = _parse(_decode(content, str(file)), str(file), do)
    for number, record in enumerate(found if isinstance(found, list) else [found], start=1):
        yield f"{file}, record {number}", record


def _parse(text: str, where: str, do: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"not a JSON record: {error}", where=where, do=do) from error


def _read_csv(file: Path, stream: io.BufferedIOBase) -> Iterator[tuple[str, Any]]:
    csv.field_size_limit(MAX_RECORD)
    read = iter(partial(stream.readline, MAX_RECORD + 1), b"")
    lines = (_decode(line, f"{file}:{number}") for number, line in enumerate(read, start=1))
    rows = csv.DictReader(lines, strict=True)
    try:
        names = [name for name in rows.fieldnames or () if name]
        if twice := [name for name in names if names.count(name) > 1]:
            what, do = f"two columns have the name {twice[0]!r}", "rename or remove one of them"
            raise DataError(what, where=f"{file}, its first line", do=do)
        for number, row in enumerate(rows, start=1):
            where = f"{file}, row {number}"
            if None in row or None in row.values():
                what = f"the row has {'more' if None in row else 'fewer'} values than there are columns"
                raise DataError(what, where=where, do="correct or remove the row")
            yield where, row
    except csv.Error as error:
        raise DataError(f"not a CSV file: {error}", where=f"{file}:{rows.line_num}", do="correct the file") from error


def _read_parquet(file: Path) -> Iterator[tuple[str, Any]]:
    _require("pyarrow", file)
    from pyarrow import ArrowException  # noqa: PLC0415 - optional
    from pyarrow.parquet import ParquetFile  # noqa: PLC0415

    try:
        with ParquetFile(file) as table:
            rows = (row for batch in table.iter_batches(batch_size=256) for row in batch.to_pylist())
            yield from ((f"{file}, row {number}", without_filled(row)) for number, row in enumerate(rows, start=1))
    except (ArrowException, UnicodeDecodeError) as error:
        what = f"cannot read the file: {error}"
        raise DataError(what, where=str(file), do="check that it is whole") from error


def _read_lines(file: Path, stream: io.BufferedIOBase) -> Iterator[str]:
    """The lines of a text file; a line of more than MAX_LINE bytes is cut."""
    rest = b""
    for number in count(1):
        line = rest + stream.readline(MAX_LINE - len(rest))
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
        if len(line) < 8 or line.count(0) <= len(line) // 3:
            return line.decode("utf-8-sig")
        fault = "many bytes are zero"
    except UnicodeDecodeError as error:
        fault = str(error)
    do = "convert the file to UTF-8, e.g. iconv -f latin1 -t utf-8; files of Windows: iconv -f utf-16 -t utf-8"
    raise DataError(f"not UTF-8: {fault}", where=where, do=do)
