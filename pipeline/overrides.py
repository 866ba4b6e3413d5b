"""Checks each word of the command line before Hydra reads it, so that all mistakes are reported at once."""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Any, cast, get_args, get_origin, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from instruments.errors import ConfigError, redact
from models.checkpoint.folder import expand_user
from models.config import setting_word
from pipeline.check import EMPTY_OUTPUT, LONGEST, unknown_choice
from pipeline.disk import nearest_existing
from pipeline.help import groups
from pipeline.settings import Settings, is_boolean
from stages.accumulators.config import hide_password
from stages.text.config import SourceConfig

WHERE = "command line"
FOLDERS = {"output_dir", "hydra.run.dir", "hydra.sweep.dir"}  # the run writes to these
_NEXT_ADDRESS = re.compile(r",(?=\w+://)")  # between the addresses of a sweep

# Type of a setting → its name in messages, and an example.
ONE: dict[Any, tuple[str, str]] = {
    int: ("a whole number", "16"),
    float: ("a number", "0.5"),
    bool: ("true or false", "true"),
    str: ("a text", "name"),
    NoneType: ("null", "null"),
    SourceConfig: ("a source", '{path:"FILE_OR_FOLDER",share:1}'),
}


def command_line(overrides: Sequence[str], **changes: object) -> str:
    """The typed command with some settings changed, ready to paste; without passwords.

    A change to another stage than train leaves out FSDP, which one process does not have and only train reads.
    """
    dropped = {*changes} | ({"train.fsdp"} if changes.get("stage", "train") != "train" else set())
    kept = [word for word in overrides if word.partition("=")[0] not in dropped]
    changed = [f"{key}={value}" for key, value in changes.items()]
    return redact(" ".join(["python -m pipeline", *map(shlex.quote, [*kept, *changed])]))


def hide_passwords(words: Sequence[str]) -> list[str]:
    """Remove the password from `store.url=`; this process remembers it for the connection."""
    return [_hide_password(word) if word.lstrip("+").startswith("store.url=") else word for word in words]


def _hide_password(word: str) -> str:
    key, _equals, value = word.partition("=")
    for address in _NEXT_ADDRESS.split(value):
        hide_password(address.strip("'\""))
    return f"{key}={','.join(map(redact, _NEXT_ADDRESS.split(value)))}"


class _Options:
    """The part of Hydra's config loader that `score=glob(*)` needs."""

    def get_group_options(self, group: str, **_filter: object) -> list[str]:
        """The options of a group."""
        return groups().get(group, [])


def parse_overrides(words: Sequence[str]) -> list[Override]:
    """The words as Hydra reads them. Raises HydraException or ValueError: a word cannot be read."""
    return OverridesParser.create(cast(Any, _Options())).parse_overrides([*words])


def override_errors(words: Iterable[str], *, sweep: bool) -> dict[str, list[ConfigError]]:
    """Word → its errors, for faulty words only. `words` excludes flags; `sweep`: a key may have several values."""
    options = groups()
    found = {word: list(_word_errors(word, options, sweep=sweep)) for word in words}
    return {word: errors for word, errors in found.items() if errors}


def first_word(word: str) -> str:
    """The group or dial that an override changes: `data` for `+data.path=x`."""
    return word.partition("=")[0].lstrip("+~").partition(".")[0]


def _word_errors(word: str, options: dict[str, list[str]], *, sweep: bool) -> Iterator[ConfigError]:
    try:
        (override,) = parse_overrides([word])
    except (HydraException, ValueError, RecursionError):  # ValueError: a number with more digits than Python reads
        yield _unreadable_word(word, options)
        return
    key = override.key_or_group
    if faults := [*_folder_errors(override)]:
        yield from faults
        return
    if override.is_hydra_override() or override.is_delete():
        return
    if override.is_sweep_override() and not sweep:
        do = f"python -m pipeline -m {shlex.quote(word)}"
        what = f"{word} is a sweep over values; a text with a comma needs quotes in quotes, a list brackets"
        yield ConfigError(what, where=WHERE, do=do)
        return
    values = list(override.sweep_iterator()) if override.is_discrete_sweep() else [override.value()]
    if not values:
        yield ConfigError(f"{word} is a sweep over no value", where=WHERE, do="a range or a pattern that holds some")
    for value in values:
        if key in options:
            chosen = value if isinstance(value, list) else [value]
            yield from (unknown_choice(key, option, options[key]) for option in chosen if option not in options[key])
        elif (kind := find_type(key)) is None:
            yield _unknown_key(word, options)
            return
        elif not _accepts(key, kind, value):
            yield ConfigError(f"{key}={value} should be {_in_words(kind)}", where=WHERE, do=_example(key, kind))


def _folder_errors(override: Override) -> Iterator[ConfigError]:
    """Errors of a folder to which Hydra would write before any other check; validation checks output_dir itself."""
    key = override.key_or_group
    if key not in FOLDERS or override.is_sweep_override():
        return
    value, do = str(override.value() or ""), f"{key}=outputs/runs/now"
    if not value.strip():
        what = f"{key} is empty: is a variable of the shell not set?"
        yield EMPTY_OUTPUT if key == "output_dir" else ConfigError(what, where=WHERE, do=do)
    elif key != "output_dir" and not (place := nearest_existing(Path(value))).is_dir():
        yield ConfigError(f"{place} is a file, not a folder", where=WHERE, do=do)


def _unreadable_word(word: str, options: Mapping[str, list[str]]) -> ConfigError:
    """The error for a word that is not key=value, or whose value needs quotes."""
    key, equals, value = word.lstrip("+").partition("=")
    kind = find_type(key) or (str if key in options or key.startswith("hydra") else None)
    if not equals or kind is None:
        return ConfigError(f"{word[:200]} is no setting", where=WHERE, do="stage=scan, or another key=value")
    if len(word) > LONGEST:
        do = f"{key}={options[key][0]}" if key in options else _example(key, kind)
        return ConfigError(f"{key} has a value of {len(value):,} characters", where=WHERE, do=do)
    if value.startswith("~"):  # the shell does not expand it inside quotes
        value = str(expand_user(value))
    is_text = get_origin(kind) is not list and str in {kind, *get_args(kind)}
    return ConfigError(
        f"{word} cannot be read: a text with characters such as = ! ( ) [ ] {{ }} ä needs quotes that the shell leaves",
        where=WHERE,
        do=setting_word(key, value) if is_text else _example(key, kind),
    )


def _accepts(key: str, kind: Any, value: object) -> bool:  # noqa: ANN401 - an annotation
    """Whether the schema accepts the value; for bool only words and 0 and 1, and no text for lists."""
    if not _are_booleans(kind, value):
        return False
    if list in {get_origin(part) for part in (kind, *get_args(kind))} and isinstance(value, str) and "${" not in value:
        return False
    try:
        if item := _ITEM.fullmatch(key):
            OmegaConf.update(OmegaConf.structured(get_args(TYPES[item[1]])[0]), item[2], value)
        else:
            OmegaConf.update(_TRIED, key, value)
    except OmegaConfBaseException:
        return False
    return True


def _are_booleans(kind: Any, value: object) -> bool:  # noqa: ANN401 - an annotation
    """Whether all values for bool, also in the items of a list, are words, or 0 and 1; OmegaConf takes '7' for true."""
    if kind is bool:
        return is_boolean(value)
    items = value if get_origin(kind) is list and isinstance(value, list) else []
    types = get_type_hints(get_args(kind)[0]) if items and is_dataclass(get_args(kind)[0]) else {}
    return all(
        _are_booleans(types.get(key), inner) for item in items if isinstance(item, dict) for key, inner in item.items()
    )


# Settings of earlier versions → what to do instead.
GONE = {
    "extract.verify": "without it: the next stage checks the files' hashes",
    "train.fsdp_config": "train.fsdp=true alone: every decoder layer is sharded",
}


def _unknown_key(word: str, options: Mapping[str, list[str]]) -> ConfigError:
    """The error for a setting that does not exist, with the closest existing one as the remedy."""
    key, _equals, value = word.lstrip("+").partition("=")
    known = [*TYPES, *options]
    by_last_word = {name.rpartition(".")[2]: name for name in known}
    close = get_close_matches(key, known, n=1, cutoff=0.7) or [
        by_last_word[name] for name in get_close_matches(key.rpartition(".")[2], by_last_word, n=1, cutoff=0.7)
    ]
    if key in GONE:
        return ConfigError(f"there is no setting {key} any more", where=WHERE, do=GONE[key])
    remedy = f"{close[0]}={value}" if close else "python -m pipeline --cfg job lists the settings"
    return ConfigError(f"there is no setting {key}", where=WHERE, do=remedy)


def _find_types(kind: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and annotation of every setting."""
    for name, annotation in get_type_hints(kind).items():
        if is_dataclass(annotation):
            yield from _find_types(annotation, f"{prefix}{name}.")  # type: ignore[arg-type]
        else:
            yield f"{prefix}{name}", annotation


TYPES: Mapping[str, Any] = dict(_find_types(Settings))
_TRIED = OmegaConf.structured(Settings)  # values are assigned here to test their type, and never read
_ITEM = re.compile(r"(.+)\.\d+\.(\w+)")  # data.sources.0.share: a setting of an item of a list


def find_type(key: str) -> Any:  # noqa: ANN401 - an annotation
    """The annotation of a setting, also of one inside a list item; None: no such setting."""
    if (item := _ITEM.fullmatch(key)) and get_origin(kind := TYPES.get(item[1])) is list:
        return get_type_hints(get_args(kind)[0]).get(item[2])
    return TYPES.get(key)


def _in_words(kind: Any) -> str:  # noqa: ANN401 - an annotation
    """A type's name in messages."""
    if get_origin(kind) is list:
        return f"a list of {ONE[get_args(kind)[0]][0].partition(' ')[2]}s"
    return " or ".join(ONE[part][0] if part in ONE else _in_words(part) for part in get_args(kind) or (kind,))


def _example(key: str, kind: Any) -> str:  # noqa: ANN401 - an annotation
    """The setting with an example of a valid value, ready to paste."""
    if get_origin(kind) is list:
        word = f"{key}=[{ONE[get_args(kind)[0]][1]}]"
        return shlex.quote(word) if "{" in word else word  # the shell would expand the braces
    return f"{key}={ONE[kind][1]}" if kind in ONE else _example(key, get_args(kind)[0])
