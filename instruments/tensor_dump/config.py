"""What is dumped of a running model, and how; settings also come from environment variables."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from instruments.errors import ConfigError
from instruments.json_kinds import check_fields, kinds_of

LINEAR, ATTENTION, EXPERTS = "linear", "attention", "experts"
CONVOLUTION, EMBEDDING = "convolution", "embedding"
NORM_LINEAR = "layernorm_linear"  # of TransformerEngine: its input is the norm's, its weight the Linear's
FORWARD, BACKWARD = "forward", "backward"
# Of every layer with a weight, and of attention, by default; those of the backward pass begin with grad.
_WEIGHTED, _HEADS = (
    ("input", "weight", "grad_output"),
    ("query", "key", "value", "grad_query", "grad_key", "grad_value"),
)
DEFAULT_TENSORS = (*_WEIGHTED, *_HEADS, "expert")
ON_REQUEST = ("output", "grad_weight")
ALL_TENSORS = (*DEFAULT_TENSORS, *ON_REQUEST)
# Tensors by the kind of module that has them.
TENSORS = {
    **dict.fromkeys((LINEAR, NORM_LINEAR, CONVOLUTION, EMBEDDING), (*_WEIGHTED, *ON_REQUEST)),
    ATTENTION: (*_HEADS, "output"),
    EXPERTS: (*_WEIGHTED, "expert", *ON_REQUEST),
}
QUANT_TYPES = ("hifp8", "mxfp8", "mxfp4", "bf16", "fp16")


@dataclass
class DumpConfig:
    """Selects tensors by module, step, process and token, and says how they are buffered and stored."""

    # Modules, by glob on their names, as in ["*.layers.3.*", "*.q_proj"]; ["*"] takes every Linear, Conv1D,
    # convolution, embedding, attention and experts' layer.
    modules: list[str] = field(default_factory=lambda: ["*"], metadata={"nonempty": True})
    # What is kept. Of layers with a weight: input, weight, grad_output; of attention, as its kernel gets them: query,
    # key, value, grad_query, grad_key, grad_value. Of the experts' fused layers also expert: which one each row goes
    # to. On request: output, and grad_weight, what one backward pass adds to the weight's gradient.
    tensors: list[str] = field(
        default_factory=lambda: list(DEFAULT_TENSORS), metadata={"choices": ALL_TENSORS, "nonempty": True}
    )
    # Steps that are dumped: first_step, and every so many after it ...
    first_step: int = field(default=0, metadata={"minimum": 0})
    every_steps: int = field(default=1, metadata={"minimum": 1})
    # ... but no more than this many; null: no end.
    max_steps: int | None = field(default=None, metadata={"minimum": 1})
    # Processes that dump, by global rank; null: all.
    ranks: list[int] | None = field(default=None, metadata={"minimum": 0})
    # Token positions that are kept: first_token, and every so many after it ...
    first_token: int = field(default=0, metadata={"minimum": 0})
    every_tokens: int = field(default=1, metadata={"minimum": 1})
    # ... but no more than this many of a sequence; null: all.
    max_tokens: int | None = field(default=None, metadata={"minimum": 1})
    # Also keep what a layer computes again in the backward pass (gradient checkpointing), marked as such. Gradients
    # are kept once in any case.
    recomputed: bool = False
    # tensors: their bytes and statistics; statistics: shape, range, mean and deviation alone.
    keep: str = field(default="tensors", metadata={"choices": ("tensors", "statistics")})
    # Keep this many last steps in memory and write them only when a loss is not finite; null: write every step.
    last_steps: int | None = field(default=None, metadata={"minimum": 1})
    # MiB of host memory for tensors on their way to the disk; of a GPU, pinned.
    memory_mib: int = field(default=512, metadata={"minimum": 1})
    # When that memory is full: block (training waits), drop (the tensor is counted, not kept), statistics (only its
    # statistics are kept).
    when_full: str = field(default="block", metadata={"choices": ("block", "drop", "statistics")})
    # MiB after which a file is closed; from then on its content survives a killed process.
    shard_mib: int = field(default=64, metadata={"minimum": 1})
    # The number format under study: hifp8, mxfp8, mxfp4, bf16 or fp16. The tensors' real format is recorded as well.
    quant_type: str | None = field(default=None, metadata={"choices": QUANT_TYPES})
    # Also store every tensor rounded into quant_type, with its error.
    fake_quant: bool = False


def contradictions(config: DumpConfig, prefix: str = "") -> Iterator[ConfigError]:
    """What is wrong; `prefix` is put before every setting's name."""
    if not config.fake_quant:
        return
    if config.quant_type is None:
        yield ConfigError(
            f"{prefix}fake_quant=true rounds into {prefix}quant_type, and there is none",
            where=f"settings {prefix}quant_type and {prefix}fake_quant",
            do=f"{prefix}quant_type=mxfp8, or {prefix}fake_quant=false",
        )
    if config.keep == "statistics":
        yield ConfigError(
            f"{prefix}fake_quant=true stores rounded tensors, and {prefix}keep=statistics stores none",
            where=f"settings {prefix}keep and {prefix}fake_quant",
            do=f"{prefix}keep=tensors, or {prefix}fake_quant=false",
        )


ENABLED, FOLDER, QUANT_TYPE = "TENSOR_SAVE_ENABLED", "TENSOR_SAVE_DIR", "CUSTOM_QUANT_TYPE"
SETTINGS = "TENSOR_SAVE_CONFIG"
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def read_control(
    folder: Path | None, config: DumpConfig, environment: Mapping[str, str]
) -> tuple[bool, Path, DumpConfig]:
    """Whether to dump, where to and what, after a look at the environment.

    An argument that is given is not overruled, except that ENABLED can switch off.

    Raises:
        ConfigError: a variable or a setting has no meaning, or there is no folder.
    """
    word = environment.get(ENABLED, "").strip().lower() or "1"
    if word not in {*_YES, *_NO}:
        raise ConfigError(
            f"{ENABLED}={word} is neither yes nor no", where=f"environment variable {ENABLED}", do=f"{ENABLED}=1, or 0"
        )
    label = config.quant_type or environment.get(QUANT_TYPE) or None
    if label not in {None, *QUANT_TYPES}:
        where = "config.quant_type" if config.quant_type else f"environment variable {QUANT_TYPE}"
        raise ConfigError(
            f"unknown quant type {label!r}; known are {', '.join(QUANT_TYPES)}",
            where=where,
            do="mxfp8, or leave it out",
        )
    enabled = word in _YES
    named = folder or (Path(environment[FOLDER]) if environment.get(FOLDER) else None)
    if enabled and named is None:
        raise ConfigError(
            "no folder to dump into", where="TensorDump", do=f"TensorDump(model, folder), or {FOLDER}=dump"
        )
    joined = replace(config, quant_type=label)
    _check(joined)
    return enabled, named or Path(), joined


def read_settings(environment: Mapping[str, str]) -> DumpConfig:
    """What TENSOR_SAVE_CONFIG says, a JSON object of settings. Raises ConfigError."""
    words, known = environment.get(SETTINGS, "") or "{}", asdict(DumpConfig())
    try:
        given = json.loads(words)
        check_fields(given if not isinstance(given, dict) else known | given, kinds_of(DumpConfig))
        if unknown := sorted(set(given) - set(known)):
            raise ValueError(f"there is no setting {', '.join(unknown)}")
    except ValueError as error:
        raise ConfigError(
            f"{SETTINGS} holds no settings of a dump: {error}",
            where=f"environment variable {SETTINGS}",
            do=f"""{SETTINGS}='{{"max_steps": 2}}'""",
        ) from error
    return DumpConfig(**given)


def _check(config: DumpConfig) -> None:
    """What the pipeline checks before a stage runs, for those who come without it."""
    for spec in fields(config):
        value, rules = getattr(config, spec.name), spec.metadata
        for item in value if isinstance(value, list) else [value]:
            what = remedy = None
            if item is not None and item not in rules.get("choices", [item]):
                what, remedy = f"is none of {', '.join(rules['choices'])}", rules["choices"][0]
            elif item is not None and "minimum" in rules and item < rules["minimum"]:
                what, remedy = f"is below {rules['minimum']}", rules["minimum"]
            if what:
                name = spec.name
                raise ConfigError(f"{name}={item} {what}", where=f"setting {name}", do=f"{name}={remedy}")
    for error in contradictions(config):
        raise error
