"""The words of a command line: what they stand for, and all mistakes in them before Hydra reads one."""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import Field, make_dataclass
from difflib import get_close_matches
from os.path import abspath, exists, isdir  # unlike those of Path, they take names that are too long for a file system
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from instruments.errors import ConfigError, first_line, redact
from models.checkpoint.folder import expand_user
from models.config import setting_word
from pipeline.advice import COMMANDS, SYNONYMS, other_values
from pipeline.check import as_word, default_text, find_fields, folder_errors, unknown_choice, value_errors
from pipeline.help import LOCAL, groups
from pipeline.settings import AUTO_LAYERS, Settings, find_wrong_values
from stages.text.config import DataConfig, SourceConfig
from stages.text.files import find_kind
from stages.train.config import TrainConfig

WHERE = "command line"


def expand_words(words: Iterable[str]) -> list[str]:
    """The words, with `model=/a/path` as `model=local model.path=/a/path ...`; other words stay as they are."""
    words = list(words)
    typed = {key for word in words if "." in (key := word.partition("=")[0])}
    expanded = []
    for word in words:
        group, _equals, value = word.partition("=")
        found = find_words(group, value.strip("'\"")) if group in LOCAL else []
        expanded += [new for new in found if new.partition("=")[0] not in typed] or [word]
    return expanded


def find_words(group: str, value: str) -> list[str]:
    """The words for a path, or for a name on the hub such as owner/name; [] for other values, such as options."""
    if not value or value in groups()[group] or ("," in value and not exists(expand_user(value))):  # noqa: PTH110
        return []
    is_name = bool(re.fullmatch(r"[\w.-]+/[\w.-]+", value, re.ASCII)) and value[0] not in ".~"
    path = expand_user(value)
    if "/" not in value and not isdir(path) and not re.search(r"\.[a-z]{2,}$", value):  # noqa: PTH112
        return []
    is_file = group == "data" and bool(find_kind(path))  # that does not exist: a mistyped path, no name on the hub
    if is_name and not is_file and not exists(path):  # noqa: PTH110
        words, label = [f"{group}=hub", quote(f"{group}.name", value)], path.name
    else:
        words, label = [f"{group}={LOCAL[group]}", quote(f"{group}.path", str(path))], Path(abspath(path)).name  # noqa: PTH100
    label = re.sub(r"[^a-zA-Z0-9.+-]+", "_", label).lstrip(".")[:100]
    return [*words, quote("model.label", label or "model")] if group == "model" else words


def quote(name: str, value: object) -> str:
    """A setting as a word that Hydra reads."""
    return f"{name}={as_word(value)}"


def command_line(overrides: Sequence[str], **changes: object) -> str:
    """The typed command with some settings changed, ready to paste; without passwords."""
    kept = [word for word in overrides if word.partition("=")[0] not in changes]
    changed = [f"{key}={value}" for key, value in changes.items()]
    return redact(" ".join(["python -m pipeline", *map(shlex.quote, [*kept, *changed])]))


def parse_overrides(words: Sequence[str]) -> list[Override]:
    """The words as Hydra reads them. Raises HydraException or ValueError: a word cannot be read."""
    # The part of Hydra's config loader that `score=glob(*)` needs.
    loader = SimpleNamespace(get_group_options=lambda group, **_filter: groups().get(group, []))
    return OverridesParser.create(cast(Any, loader)).parse_overrides([*words])


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
    if override.is_delete():
        return
    if override.is_hydra_override():
        yield from _hydra_errors(key, str(override.value()))
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
        elif (spec := find_field(key)) is None:
            yield _unknown_key(word, options)
            return
        elif fault := _type_fault(key, value):
            what = fault if fault.startswith(f"{key}=") else f"{key}={value}: {fault}"
            meant = next((as_word(other) for other in other_values(value) if not _value_faults(key, other, spec)), None)
            do = _default_word(key, spec) if meant is None else f"{key}={meant}"
            yield ConfigError(what, where=WHERE, do=do)


def _default_word(key: str, spec: Field[Any]) -> str:
    """The word for a setting's default; for a list of sources, an example and the keys of its items."""
    keys = [name.removeprefix(f"{key}.0.") for name in _ITEM_FIELDS if name.startswith(f"{key}.0.")]
    example = f"'{key}=[{{path:FILE_OR_FOLDER,share:1}}]'; an item may have {', '.join(keys)}"
    return example if keys else f"{key}={default_text(spec)}"


def _hydra_errors(key: str, value: str) -> Iterator[ConfigError]:
    """Errors: a folder of a run that cannot be written; a sweep that is written in Hydra's own settings."""
    if key in {"hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir"}:
        yield from folder_errors(key, value, f"the command without {key}")
    elif key.startswith("hydra.sweeper.params"):
        what = f"{key} is not supported: the words of the command line are the sweep"
        yield ConfigError(what, where=WHERE, do="python -m pipeline -m seed=0,1")


def _unreadable_word(word: str, options: dict[str, list[str]]) -> ConfigError:
    """The error for a word that is not key=value, or whose value needs quotes."""
    key, equals, value = word.lstrip("+").partition("=")
    spec = find_field(key)
    if not equals or not (spec or key in options or key.startswith("hydra")):
        do = COMMANDS.get(key) or (find_words("model", key) or ["stage=scan, or another key=value"])[0]
        return ConfigError(f"{word[:200]} is no setting", where=WHERE, do=do)
    if spec is None or spec.type in {str, str | None}:
        # The shell does not expand ~ inside quotes.
        do = setting_word(key, str(expand_user(value)) if value.startswith("~") else value)
    else:
        do = f"{key}={default_text(spec)}"
    return ConfigError(
        f"{word[:200]} cannot be read: characters such as = ! ( ) [ ] {{ }} ä need quotes that the shell leaves",
        where=WHERE,
        do=do,
    )


def _type_fault(key: str, value: object) -> str:
    """Why the schema does not accept a value; empty if it does."""
    if (key, value) == AUTO_LAYERS:
        return ""
    name = _ITEM.sub(".0.", key)
    group, _dot, rest = name.partition(".")
    try:
        # A copy of the group or of the dials alone: the whole schema takes ten times as long.
        OmegaConf.update(deepcopy(_TRIED[group] if rest else _DIALS), rest or name, value)
    except OmegaConfBaseException as error:
        return first_line(error)
    for part in reversed(name.split(".")):
        value = [value] if part == "0" else {part: value}
    return "; ".join(find_wrong_values(Settings, value))


def _value_faults(key: str, value: object, spec: Field[Any]) -> bool:
    """Whether a value is of the wrong type, or breaks the setting's own rule."""
    items = value if isinstance(value, list) else [value]
    return bool(_type_fault(key, value)) or any([*value_errors(key, item, spec)] for item in items)


def _unknown_key(word: str, options: dict[str, list[str]]) -> ConfigError:
    """The error for a setting that does not exist, with a word that takes the value as the remedy."""
    key, _equals, value = word.lstrip("+").partition("=")
    last_words = {name.rpartition(".")[2]: name for name in [*options, *FIELDS]}
    close = get_close_matches(key, [*FIELDS, *options], n=2, cutoff=0.75)
    close += [last_words[name] for name in get_close_matches(key.rpartition(".")[2], last_words, n=2, cutoff=0.75)]
    advice = filter(None, (SYNONYMS.get(name.replace("-", "_")) for name in (f"{key}={value}", key)))
    found = [meant.format(value or "true") for meant in advice] or [f"{name}={value}" for name in close]
    remedies = {meant: _remedy(meant, options) for meant in found}
    sound = [meant for meant, do in remedies.items() if do == meant]
    do = [*sound, *remedies.values(), "python -m pipeline --cfg job lists the settings"][0]
    return ConfigError(f"there is no setting {key}", where=WHERE, do=do)


def _remedy(meant: str, options: dict[str, list[str]]) -> str:
    """A word or a sentence; for a faulty word its remedy, also if its value is only checked with all settings."""
    if "=" not in meant.partition(" ")[0]:
        return meant
    word = expand_words([meant])[-1]
    for error in _word_errors(word, options, sweep=False):
        return error.do
    key, value = (override := parse_overrides([word])[0]).key_or_group, override.value()
    errors = value_errors(key, value, FIELDS[key]) if key in FIELDS and isinstance(value, str | int | float) else ()
    return next((error.do for error in errors), meant)


def flag_errors(words: Sequence[str]) -> list[ConfigError]:
    """Errors, with the words to type: flags that are none, or that Hydra has and that run or read other files."""
    errors = []
    for flag, following in zip(words, [*words[1:], ""], strict=False):
        name, equals, value = flag.partition("=")
        if flag.startswith("-") and name not in FLAGS:
            value = value if equals or following.startswith("-") or "=" in following else following
            word = f"{name.lstrip('-').replace('-', '_')}={value or 'true'}"
            what, do = f"there is no flag {flag}: settings have no dashes", _remedy(word, groups())
            errors.append(ConfigError(what, where=WHERE, do=do))
    return errors


# Hydra's flags that are supported, as they are written here: Hydra also takes abbreviations, of all its flags.
FLAGS = {"--hydra-help", "--cfg", "-c", "--resolve", "--package", "-p", "--run", "-r", "--info", "-i"}
FLAGS |= {"--multirun", "-m"}
# One source, so that settings of an item of the list can be tried.
_TRIED = OmegaConf.structured(
    Settings(data=DataConfig(sources=[SourceConfig()]), train=TrainConfig(sources=[SourceConfig()]))
)
_ITEM = re.compile(r"\.\d+\.")  # data.sources.0.share: a setting of an item of a list
FIELDS: Mapping[str, Field[Any]] = {name: spec for name, _value, spec in find_fields(Settings())}
_DIALS = OmegaConf.structured(
    make_dataclass("Dials", [(name, spec.type, spec) for name, spec in FIELDS.items() if "." not in name])
)
_ITEM_FIELDS = {
    name: spec for node in ("data", "train") for name, _value, spec in find_fields(SourceConfig(), f"{node}.sources.0.")
}


def find_field(key: str) -> Field[Any] | None:
    """The field of a setting, also of one inside a list item; None: no such setting."""
    return FIELDS.get(key) or _ITEM_FIELDS.get(_ITEM.sub(".0.", key))
