"""The dump as environment variables control it: TENSOR_SAVE_ENABLED, TENSOR_SAVE_DIR, CUSTOM_QUANT_TYPE."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from instruments.errors import ConfigError
from instruments.tensor_dump.config import QUANT_TYPES, DumpConfig, contradictions

ENABLED, FOLDER, QUANT_TYPE = "TENSOR_SAVE_ENABLED", "TENSOR_SAVE_DIR", "CUSTOM_QUANT_TYPE"
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True)
class Control:
    """Whether, where and what, after a look at the environment."""

    enabled: bool
    folder: Path
    config: DumpConfig


def read_control(folder: Path | None, config: DumpConfig, environment: Mapping[str, str]) -> Control:
    """Join arguments and environment; an argument that is given is not overruled, except that ENABLED can switch off.

    Raises:
        ConfigError: a variable or a setting has no meaning, or there is no folder.
    """
    enabled = _read_switch(environment)
    label = config.quant_type or environment.get(QUANT_TYPE) or None
    if label not in {None, *QUANT_TYPES}:
        where = "config.quant_type" if config.quant_type else f"environment variable {QUANT_TYPE}"
        raise ConfigError(
            f"unknown quant type {label!r}; known are {', '.join(QUANT_TYPES)}",
            where=where,
            do="mxfp8, or leave it out",
        )
    named = folder or (Path(environment[FOLDER]) if environment.get(FOLDER) else None)
    if enabled and named is None:
        raise ConfigError(
            "no folder to dump into", where="TensorDump", do=f"TensorDump(model, folder), or {FOLDER}=dump"
        )
    joined = replace(config, quant_type=label)
    _check(joined)
    return Control(enabled, named or Path(), joined)


def _read_switch(environment: Mapping[str, str]) -> bool:
    word = environment.get(ENABLED, "").strip().lower() or "1"
    if word not in {*_YES, *_NO}:
        raise ConfigError(
            f"{ENABLED}={word} is neither yes nor no", where=f"environment variable {ENABLED}", do=f"{ENABLED}=1, or 0"
        )
    return word in _YES


def _check(config: DumpConfig) -> None:
    """What the pipeline checks before a stage runs, for those who come without it."""
    for spec in fields(config):
        value, rules = getattr(config, spec.name), spec.metadata
        for item in value if isinstance(value, list) else [value]:
            if item is None:
                continue
            if "choices" in rules and item not in rules["choices"]:
                raise _wrong(spec.name, item, f"is none of {', '.join(rules['choices'])}", rules["choices"][0])
            if "minimum" in rules and item < rules["minimum"]:
                raise _wrong(spec.name, item, f"is below {rules['minimum']}", rules["minimum"])
    for error in contradictions(config):
        raise error


def _wrong(name: str, value: object, what: str, remedy: object) -> ConfigError:
    return ConfigError(f"{name}={value} {what}", where=f"setting {name}", do=f"{name}={remedy}")
