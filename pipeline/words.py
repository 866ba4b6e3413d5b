"""Words of a command line that name a model or a text by its path, or by its name on the hub."""

import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

from models.checkpoint.folder import expand_user
from models.config import setting_word
from pipeline.help import groups

# Group → its option for a path.
LOCAL = {"model": "local", "data": "text"}


def expand_words(words: Iterable[str]) -> list[str]:
    """The words, with `model=/a/path` as `model=local model.path=/a/path ...`; other words stay as they are."""
    words = list(words)
    expanded = []
    for word in words:
        group, _equals, value = word.partition("=")
        found = find_words(group, value.strip("'\"")) if group in LOCAL else []
        expanded += [new for new in found if not _is_typed(new, words)] or [word]
    return expanded


def _is_typed(word: str, words: Iterable[str]) -> bool:
    """Whether a setting of this word has a word of its own."""
    key = word.partition("=")[0]
    return "." in key and any(other.partition("=")[0] == key for other in words)


def find_words(group: str, value: str) -> list[str]:
    """The words for a path, or for a name on the hub such as owner/name; [] for other values, such as options."""
    if value in groups()[group] or "," in value:
        return []
    is_name = bool(re.fullmatch(r"[\w.-]+/[\w.-]+", value, re.ASCII)) and value[0] not in ".~"
    path = expand_user(value)
    if "/" not in value and not path.is_dir() and not re.search(r"\.[a-z]{2,}$", value):
        return []
    if is_name and not path.exists():
        words, label = [f"{group}=hub", quote(f"{group}.name", value)], path.name
    else:
        words, label = [f"{group}={LOCAL[group]}", quote(f"{group}.path", str(path))], path.absolute().name
    return [*words, f"model.label={re.sub(r'[^a-zA-Z0-9.+-]+', '_', label)}"] if group == "model" else words


def quote(name: str, value: object) -> str:
    """A setting as a word that Hydra reads."""
    return f"{name}={_value(value)}"


def _value(value: object) -> str:
    """A value as Hydra reads it."""
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{_value(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_value, value))}]"
    if isinstance(value, str | Path):
        return shlex.split(setting_word("", str(value)))[0][1:]
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
