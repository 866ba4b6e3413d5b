"""Documents of local files: plain text, and tables of records."""

import csv
import gzip
import importlib.util
import io
import json
import logging
import re
import zlib
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

from instruments.errors import DataError, some
from models.checkpoint.folder import expand_user
from stages.text.config import Source
from stages.text.documents import Document, cut_passages, interleave, read_record

logger = logging.getLogger(__name__)

TEXT = (".txt", ".md")
RECORDS = (".jsonl", ".json", ".csv", ".parquet")
COMPRESSED = ".gz"
# Data that is not read; beside files that are, it is an error.
UNREAD = frozenset(
    {".tsv", ".arrow", ".feather", ".xml", ".html", ".pdf", ".docx", ".zip", ".tar", ".bz2", ".xz", ".zst", COMPRESSED}
)
# Files about the data, left out of a folder that has others.
ABOUT = re.compile(r"(readme|licen[cs]e|notice|copying|changelog|contributing|dataset_infos?)\b", re.IGNORECASE)
# A text document ends at the first blank line after this many characters ...
SHORTEST_PASSAGE = 2_000
# ... or at the first line end after this many.
LONGEST_PASSAGE = 8_000
# Files of a folder that are interleaved; limits the number of open files.
FILES_AT_ONCE = 64
# Maximum bytes of a line, and of a .json file; more is an error.
MAX_LINE, MAX_JSON = 2**26, 2**29


def list_files(source: Source) -> list[Path]:
    """The file that the source names, or the sorted files of its folder and subfolders that can be read.

    Hidden files and those whose name begins with `__` are left out, and files about the data (README, LICENSE ...).

    Raises:
        DataError: the path may not be read, there is no file that can be read, or other data beside those.
    """
    path = expand_user(str(source.path))
    where = f"{source.path_setting}={source.path}, from working folder {Path.cwd()}"
    try:
        found = sorted(_visible_files(path)) if path.is_dir() else [*filter(Path.is_file, [path])]
    except OSError as error:
        what = f"cannot read {error.filename}: {error.strerror}"
        raise DataError(what, where=where, do="check its permissions") from error
    files = [file for file in found if find_kind(file)]
    others = [file.name for file in found if file.suffix.lower() in UNREAD and not find_kind(file)]
    if files and others:
        what, do = f"the folder also holds data that is not read: {some(others)}", "move these files, or convert them"
        raise DataError(what, where=where, do=do)
    if not files:
        do = f"{source.path_setting}=FILE_OR_FOLDER of {', '.join((*TEXT, *RECORDS, COMPRESSED))}"
        raise DataError(f"{path} is no file that can be read as text, and no folder that holds one", where=where, do=do)
    return [file for file in files if not _is_about(file)] or files  # a README alone is text


def _is_about(file: Path) -> bool:
    """Whether the file is about the data, by its name."""
    return bool(ABOUT.match(file.name)) and file.suffix in {*TEXT, ".json"}


def _visible_files(folder: Path) -> Iterator[Path]:
    for file in folder.rglob("*"):
        if not any(part.startswith((".", "__")) for part in file.relative_to(folder).parts) and file.is_file():
            yield file


def find_kind(file: Path) -> str:
    """The suffix by which a file is read, without that of its compression; empty if it is not read."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes and suffixes[-1] == COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in (*TEXT, *RECORDS) else ""


def read_files(source: Source) -> Iterator[Document]:
    """The documents of a file, or of a folder's files in turn. Raises DataError."""
    files, path = list_files(source), expand_user(str(source.path))
    if about := [file.name for file in _visible_files(path) if _is_about(file) and file not in files]:
        logger.info("%s text: %d files of %s, without %s", source.role, len(files), path, some(about))
    groups = (files[start : start + FILES_AT_ONCE] for start in range(0, len(files), FILES_AT_ONCE))
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
                lines = (line.replace("\r\n", "\n") for _, line in _read_lines(file, stream))
                passages = cut_passages(lines, SHORTEST_PASSAGE, LONGEST_PASSAGE)
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
    return gzip.open(file) if file.suffix.lower() == COMPRESSED else file.open("rb")


def _read_lines(file: Path, stream: io.BufferedIOBase) -> Iterator[tuple[str, str]]:
    """The lines of a file with their places. Raises DataError: one is too long, or not UTF-8."""
    for number in count(1):
        line, where = stream.readline(MAX_LINE + 1), f"{file}:{number}"
        if not line:
            return
        if len(line) > MAX_LINE:
            what, do = f"a line has more than {MAX_LINE >> 20} MiB", "correct or remove the line"
            raise DataError(what, where=where, do=do)
        yield where, _decode(line, where)


def _read_jsonl(file: Path, stream: io.BufferedIOBase) -> Iterator[tuple[str, Any]]:
    lines = ((where, line.strip()) for where, line in _read_lines(file, stream))
    return ((where, _parse(line, where, "correct or remove the line")) for where, line in lines if line)


def _read_json(file: Path, stream: io.BufferedIOBase) -> Iterator[tuple[str, Any]]:
    content = stream.read(MAX_JSON + 1)
    if len(content) > MAX_JSON:
        what, do = f"the file has more than {MAX_JSON >> 20} MiB", "convert it to .jsonl, which is read by the line"
        raise DataError(what, where=str(file), do=do)
    found = _parse(_decode(content, str(file)), str(file), "correct the file: a list of records")
    for number, record in enumerate(found if isinstance(found, list) else [found], start=1):
        yield f"{file}, record {number}", record


def _parse(text: str, where: str, do: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"not a JSON record: {error}", where=where, do=do) from error


def _read_csv(file: Path, stream: io.BufferedIOBase) -> Iterator[tuple[str, Any]]:
    csv.field_size_limit(MAX_LINE)
    rows = csv.DictReader((line for _, line in _read_lines(file, stream)), strict=True)
    try:
        for number, row in enumerate(rows, start=1):
            where = f"{file}, row {number}"
            if None in row or None in row.values():
                what = f"the row has {'more' if None in row else 'fewer'} values than there are columns"
                raise DataError(what, where=where, do="correct or remove the row")
            yield where, row
    except csv.Error as error:
        raise DataError(f"not a CSV file: {error}", where=f"{file}:{rows.line_num}", do="correct the file") from error


def _read_parquet(file: Path) -> Iterator[tuple[str, Any]]:
    if importlib.util.find_spec("pyarrow") is None:
        do = "pip install pyarrow, or convert the file to .jsonl"
        raise DataError("reading this file needs the package pyarrow", where=str(file), do=do)
    from pyarrow import ArrowException  # noqa: PLC0415 - optional
    from pyarrow.parquet import ParquetFile  # noqa: PLC0415

    try:
        with ParquetFile(file) as table:
            rows = (row for batch in table.iter_batches(batch_size=256) for row in batch.to_pylist())
            yield from ((f"{file}, row {number}", row) for number, row in enumerate(rows, start=1))
    except ArrowException as error:
        what = f"cannot read the file: {error}"
        raise DataError(what, where=str(file), do="check that it is whole") from error


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
