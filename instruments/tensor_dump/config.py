"""Settings of a tensor dump, also read from environment variables."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from instruments.errors import ConfigError
from instruments.files import check_fields, kinds_of

LINEAR, ATTENTION, EXPERTS = "linear", "attention", "experts"
CONVOLUTION, EMBEDDING = "convolution", "embedding"
NORM_LINEAR = "layernorm_linear"  # of TransformerEngine: input of the norm, weight of the Linear
FORWARD, BACKWARD = "forward", "backward"
# Default tensors of layers with a weight, and of attention; those of the backward pass begin with grad.
_WEIGHTED, _HEADS = (
    ("input", "weight", "grad_output"),
    ("query", "key", "value", "grad_query", "grad_key", "grad_value"),
)
DEFAULT_TENSORS = (*_WEIGHTED, *_HEADS, "expert")
ALL_TENSORS = (*DEFAULT_TENSORS, "output")
# Kind of module → its tensors.
TENSORS = {
    **dict.fromkeys((LINEAR, NORM_LINEAR, CONVOLUTION, EMBEDDING), (*_WEIGHTED, "output")),
    ATTENTION: (*_HEADS, "output"),
    EXPERTS: (*_WEIGHTED, "expert", "output"),
}
QUANT_TYPES = ("hifp8", "mxfp8", "mxfp4", "bf16", "fp16")


@dataclass
class TensorSelection:
    """Selects tensors by module and token, and sets how they are stored; conf/dump/default.yaml explains each."""

    modules: list[str] = field(default_factory=lambda: ["*"], metadata={"nonempty": True})
    tensors: list[str] = field(
        default_factory=lambda: list(DEFAULT_TENSORS), metadata={"choices": ALL_TENSORS, "nonempty": True}
    )
    max_tokens: int | None = field(default=None, metadata={"minimum": 1})
    keep: str = field(default="tensors", metadata={"choices": ("tensors", "statistics")})
    memory_mib: int = field(default=512, metadata={"minimum": 1})
    quant_type: str | None = field(default=None, metadata={"choices": QUANT_TYPES})


@dataclass
class DumpConfig(TensorSelection):
    """Selects steps and processes as well."""

    first_step: int = field(default=0, metadata={"minimum": 0})  # dump from this step on
    every_steps: int = field(default=1, metadata={"minimum": 1})  # then every n-th step
    max_steps: int | None = field(default=None, metadata={"minimum": 1})  # at most this many
    ranks: list[int] | None = field(default=None, metadata={"minimum": 0})  # processes that dump; None: all
    # Latest steps kept in memory, written only when a loss is not finite or the loop ends by an exception.
    last_steps: int | None = field(default=None, metadata={"minimum": 1})


ENABLED, FOLDER, QUANT_TYPE = "TENSOR_SAVE_ENABLED", "TENSOR_SAVE_DIR", "CUSTOM_QUANT_TYPE"
SETTINGS = "TENSOR_SAVE_CONFIG"
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def read_variable(name: str, environment: Mapping[str, str]) -> str | None:
    """The value of a variable; None if it is not set, empty, or invalid, which `read_control` reports."""
    word = environment.get(name, "").strip()
    if name == ENABLED:
        return (dict.fromkeys(_YES, "true") | dict.fromkeys(_NO, "false")).get(word.lower())
    return word if word and (name != QUANT_TYPE or word in QUANT_TYPES) else None


def read_control(
    folder: Path | None, config: DumpConfig, environment: Mapping[str, str]
) -> tuple[bool, Path, DumpConfig]:
    """Whether to dump, the folder and the settings, from the arguments and the environment.

    Arguments take precedence, but ENABLED can always switch the dump off. Raises ConfigError: an invalid variable or
    setting, or no folder.
    """
    word = environment.get(ENABLED, "").strip().lower() or "1"
    enabled = word in _YES
    if not enabled and word not in _NO:
        what = f"{ENABLED}={word} is neither yes nor no"
        raise ConfigError(what, where=f"environment variable {ENABLED}", do=f"{ENABLED}=1, or 0")
    label = config.quant_type or environment.get(QUANT_TYPE, "").strip() or None
    if label not in {None, *QUANT_TYPES}:
        what = f"unknown quant type {label!r}; known are {', '.join(QUANT_TYPES)}"
        where = "config.quant_type" if config.quant_type else f"environment variable {QUANT_TYPE}"
        raise ConfigError(what, where=where, do="mxfp8, or leave it out")
    if enabled and not folder and not environment.get(FOLDER):
        do = f"TensorDump(model, folder), or {FOLDER}=dump"
        raise ConfigError("no folder to dump into", where="TensorDump", do=do)
    joined = replace(config, quant_type=label)
    _check(joined)
    return enabled, folder or Path(environment.get(FOLDER, "")), joined


def read_settings(environment: Mapping[str, str]) -> DumpConfig:
    """The settings in TENSOR_SAVE_CONFIG, a JSON object. Raises ConfigError."""
    words, known = environment.get(SETTINGS, "") or "{}", asdict(DumpConfig())
    try:
        given = json.loads(words)
        check_fields(given if not isinstance(given, dict) else known | given, kinds_of(DumpConfig))
        if unknown := sorted(set(given) - set(known)):
            raise ValueError(f"there is no setting {', '.join(unknown)}")
    except ValueError as error:
        what = f"{SETTINGS} holds no settings of a dump: {error}"
        do = f"""{SETTINGS}='{{"max_steps": 2}}'"""
        raise ConfigError(what, where=f"environment variable {SETTINGS}", do=do) from error
    return DumpConfig(**given)


def _check(config: DumpConfig) -> None:
    """The checks that the pipeline makes before a stage, for other callers."""
    for spec in fields(config):
        value, rules = getattr(config, spec.name), spec.metadata
        for item in value if isinstance(value, list) else [] if value is None else [value]:
            if item not in rules.get("choices", [item]):
                what, remedy = f"is none of {', '.join(rules['choices'])}", rules["choices"][0]
            elif item < rules.get("minimum", item):
                what, remedy = f"is below {rules['minimum']}", rules["minimum"]
            else:
                continue
            raise ConfigError(f"{spec.name}={item} {what}", where=f"setting {spec.name}", do=f"{spec.name}={remedy}")
