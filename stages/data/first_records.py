"""Looks at the paths and the first records of the text."""

import importlib.util
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from models.errors import DataError, UserError
from stages.data.config import DataConfig
from stages.data.document import Split
from stages.data.hub import describe_missing_package
from stages.data.sources import describe_emptiness, read_documents, require_conversations
from stages.data.text import list_files, read_file

# Documents of each file that are looked at.
FIRST_DOCUMENTS = 20


def check_first_records(data: DataConfig, *, heldout: bool = True) -> list[UserError]:
    """Every fault of the paths, of each local file's first records, and of what is installed. Settings are valid.

    That no document falls to the held-out text is a fault where that is read (`heldout`).
    """
    if data.kind == "hub":
        return [] if importlib.util.find_spec("datasets") else [describe_missing_package()]
    if data.kind == "python_stdlib":
        return []
    paths = {"data.path": data.path, "data.heldout_path": data.heldout_path}
    errors = [error for option, path in paths.items() if path for error in _check_path(path, option, data)]
    return errors or list(_check_splits(data, ("calibration", "heldout") if heldout else ("calibration",)))


def _check_path(path: str, option: str, data: DataConfig) -> list[UserError]:
    try:
        files = list_files(path, option)
    except DataError as error:
        return [error]
    conversations = data.labels == "completion" and option == "data.path"
    errors: list[UserError] = []
    documents = 0
    for file in files:
        try:
            documents += _count_first_documents(file, data, conversations=conversations)
        except DataError as error:
            errors.append(error)
    if not errors and not documents:
        return [DataError("the text is empty", where=f"{option}={path}", do=f"{option}=text that holds something")]
    return errors


def _count_first_documents(file: Path, data: DataConfig, *, conversations: bool) -> int:
    documents = read_file(file, data)
    if conversations:
        documents = require_conversations(documents)
    return sum(1 for _ in islice(documents, FIRST_DOCUMENTS))


def _check_splits(data: DataConfig, splits: tuple[Split, ...]) -> Iterator[UserError]:
    for split in splits:
        try:
            if next(read_documents(data, split), None) is None:
                yield describe_emptiness(data, split)
        except DataError as error:
            yield error
            return
