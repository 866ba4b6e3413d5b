"""The command line, checked word by word before Hydra sees it, so that all mistakes are reported at once."""

import shlex
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from instruments.errors import ConfigError
from pipeline.layout import OVERLAYS, groups
from pipeline.settings import Settings
from pipeline.validate import EMPTY_OUTPUT, LONGEST, unknown_choice

WHERE = "command line"

# Types of single settings: as people say them, and an example.
ONE: dict[Any, tuple[str, str]] = {
    int: ("a whole number", "16"),
    float: ("a number", "0.5"),
    bool: ("true or false", "true"),
    str: ("a text", "name"),
    NoneType: ("null", "null"),
}


def override_errors(words: Iterable[str], *, sweep: bool) -> dict[str, list[ConfigError]]:
    """Faulty words of a command line and what is wrong with each.

    Args:
        words: the command line, without flags.
        sweep: whether several values for one key are wanted.
    """
    options = groups()
    found = {word: list(word_errors(word, options, sweep=sweep)) for word in words}
    return {word: errors for word, errors in found.items() if errors}


def first_word(word: str) -> str:
    """`data` of `+data.path=x`: the group or dial that an override is about."""
    return word.partition("=")[0].lstrip("+~").partition(".")[0]


def word_errors(word: str, options: dict[str, list[str]], *, sweep: bool) -> Iterator[ConfigError]:
    """What is wrong with one `key=value`."""
    try:
        override = OverridesParser.create().parse_override(word)
    except (HydraException, ValueError, RecursionError):  # ValueError: a number of more digits than Python reads
        yield unreadable_word(word)
        return
    if override.is_hydra_override() or override.is_delete():
        return
    if override.is_sweep_override() and not sweep:
        yield ConfigError(f"{word} is a sweep over several values", where=WHERE, do=f"python -m pipeline -m {word}")
        return
    key = override.key_or_group
    if key == "output_dir" and not str(override.value() or "").strip():  # Hydra would write to it before any check
        yield EMPTY_OUTPUT
        return
    for value in values_of(override):
        if key in options:
            yield from (unknown_choice(key, name, options[key]) for name in unknown_options(key, value, options[key]))
        elif (kind := find_type(key)) is None:
            yield unknown_key(word, options)
            return
        elif not accepts(key, value):
            yield ConfigError(f"{key}={value} should be {in_words(kind)}", where=WHERE, do=example(key, kind))


def unreadable_word(word: str) -> ConfigError:
    """The error for what is no key=value, or whose value needs quotes."""
    key, equals, value = word.partition("=")
    if not equals or find_type(key) is None:
        return ConfigError(f"{word[:200]} is no setting", where=WHERE, do="stage=scan, or another key=value")
    if len(word) > LONGEST:
        return ConfigError(
            f"{key} has a value of {len(value):,} characters", where=WHERE, do=example(key, find_type(key))
        )
    escaped = value.replace("\\'", "'").replace("'", "\\'")
    return ConfigError(
        f"{word} cannot be read: a value with characters such as = ! ( ) [ ] {{ }} needs quotes that the shell leaves",
        where=WHERE,
        do=shlex.quote(f"{key}='{escaped}'"),
    )


def unknown_options(key: str, value: object, known: list[str]) -> list[object]:
    """Options asked of a group that it does not have; of overlays there may be several, or none."""
    chosen = value if isinstance(value, list) else [value]
    return [option for option in chosen if option not in known and not (option is None and key in OVERLAYS)]


def values_of(override: Override) -> list[Any]:
    """The value, or each value of a sweep."""
    return list(override.sweep_iterator()) if override.is_discrete_sweep() else [override.value()]


def find_type(key: str) -> Any | None:  # noqa: ANN401 - an annotation
    """The annotation of the setting `key`, such as `scan.gradients`; None when there is no such setting."""
    kind: Any = Settings
    for name in key.split("."):
        if not is_dataclass(kind):
            return None
        kind = get_type_hints(kind).get(name)
    return kind


def accepts(key: str, value: object) -> bool:
    """Whether the schema takes the value; of what OmegaConf converts, not a number for a truth or a text for a list."""
    kind = find_type(key)
    if kind is bool and isinstance(value, int | float) and value not in {0, 1}:
        return False
    if list in {get_origin(part) for part in (kind, *get_args(kind))} and isinstance(value, str) and "${" not in value:
        return False
    try:
        OmegaConf.update(OmegaConf.structured(Settings), key, value)
    except OmegaConfBaseException:
        return False
    return True


def unknown_key(word: str, options: dict[str, list[str]]) -> ConfigError:
    """The error for a setting that does not exist, with the closest one that does."""
    key, _equals, value = word.lstrip("+").partition("=")
    known = [*all_keys(Settings), *options]
    by_last_word = {name.rpartition(".")[2]: name for name in known}
    last = key.rpartition(".")[2]
    close = get_close_matches(key, known, n=1, cutoff=0.7) or [
        by_last_word[word] for word in get_close_matches(last, by_last_word, n=1, cutoff=0.7)
    ]
    remedy = f"{close[0]}={value}" if close else "python -m pipeline --help lists the settings"
    return ConfigError(f"there is no setting {key}", where=WHERE, do=remedy)


def all_keys(kind: type, prefix: str = "") -> Iterator[str]:
    """Dotted names of all settings."""
    hints = get_type_hints(kind)
    for spec in fields(kind):
        if is_dataclass(hints[spec.name]):
            yield from all_keys(hints[spec.name], f"{prefix}{spec.name}.")
        else:
            yield f"{prefix}{spec.name}"


def in_words(kind: Any) -> str:  # noqa: ANN401 - an annotation
    """A type as people say it."""
    if get_origin(kind) is list:
        return f"a list of {ONE[get_args(kind)[0]][0].partition(' ')[2]}s"
    return " or ".join(ONE[part][0] if part in ONE else in_words(part) for part in get_args(kind) or (kind,))


def example(key: str, kind: Any) -> str:  # noqa: ANN401 - an annotation
    """A value that would do, to paste."""
    if get_origin(kind) is list:
        return f"{key}=[{ONE[get_args(kind)[0]][1]}]"
    if kind in ONE:
        return f"{key}={ONE[kind][1]}"
    return example(key, get_args(kind)[0])
