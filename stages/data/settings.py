"""Checks the settings against each other, without touching the text."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.errors import ConfigError, UserError
from stages.data.config import DataConfig

CHOICES = {
    "kind": ("python_stdlib", "text", "hub"),
    "packing": ("packed", "single"),
    "labels": ("full_sequence", "completion", "generated"),
    "separator": ("eos", "blank_line"),
}
HOLD_OUT = "another one, or null: data.heldout_share of the documents is then held out"


def check_settings(data: DataConfig) -> list[UserError]:
    """Every setting that has no meaning, alone or beside the others."""
    return [*_check_choices(data), *_check_numbers(data), *_check_generation(data), *_check_source(data)]


def check_length(data: DataConfig, source: Mapping[str, Any]) -> list[UserError]:
    """Sequences longer than the source model can read.

    Args:
        data: the settings.
        source: config.json of the model; one that names no longest sequence passes.
    """
    longest = longest_sequence(source)
    if longest is None or data.max_length <= longest:
        return []
    return [
        ConfigError(
            f"data.max_length={data.max_length} is longer than the model's longest sequence, {longest} tokens",
            where="setting data.max_length; max_position_embeddings of the model's config.json",
            do=f"data.max_length={longest}",
        )
    ]


def longest_sequence(source: Mapping[str, Any]) -> int | None:
    """Tokens a model can read at once by its config.json, stretched rotary positions included; None: unknown."""
    positions = source.get("max_position_embeddings")
    if positions is None:
        return None
    scaling = source.get("rope_scaling") or source.get("rope_parameters") or {}
    stretched = scaling.get("factor", 1) * scaling.get("original_max_position_embeddings", positions)
    return max(int(positions), int(stretched))


def _check_choices(data: DataConfig) -> list[UserError]:
    return [
        ConfigError(
            f"data.{field} has no value {getattr(data, field)!r}", do=f"data.{field}= one of {', '.join(choices)}"
        )
        for field, choices in CHOICES.items()
        if getattr(data, field) not in choices
    ]


def _check_numbers(data: DataConfig) -> list[UserError]:
    errors: list[UserError] = []
    if data.max_length < 2:
        what = f"data.max_length={data.max_length} leaves nothing to predict: a sequence has at least 2 tokens"
        errors.append(ConfigError(what, do="data.max_length=256"))
    for field in ("tokens", "heldout_tokens"):
        tokens = getattr(data, field)
        if tokens < max(2, data.max_length):
            what = f"data.{field}={tokens} is less than one sequence of data.max_length={data.max_length} tokens"
            errors.append(ConfigError(what, do=f"data.{field}={max(2, data.max_length)} or more"))
    if not 0 < data.heldout_share < 1:
        what = f"data.heldout_share={data.heldout_share} is not between 0 and 1, both excluded"
        errors.append(ConfigError(what, do="data.heldout_share=0.1"))
    return errors


def _check_generation(data: DataConfig) -> list[UserError]:
    if data.labels != "generated":
        return []
    errors: list[UserError] = []
    if not math.isfinite(data.temperature):
        errors.append(ConfigError(f"data.temperature={data.temperature} is no number", do="data.temperature=0"))
    longest = data.prompt_tokens + data.max_new_tokens
    if longest > data.max_length:
        what = (
            f"data.prompt_tokens={data.prompt_tokens} and data.max_new_tokens={data.max_new_tokens} do not fit into "
            f"data.max_length={data.max_length}"
        )
        errors.append(ConfigError(what, do=f"data.max_length={longest}"))
    return errors


def _check_source(data: DataConfig) -> list[UserError]:
    checks = {"python_stdlib": _check_stdlib, "text": _check_text, "hub": _check_hub}
    return checks[data.kind](data) if data.kind in checks else []


def _check_stdlib(data: DataConfig) -> list[UserError]:
    if data.labels != "completion":
        return []
    what = "data.labels=completion needs conversations, and the standard library is plain text"
    return [ConfigError(what, do="data.labels=full_sequence, or data=text data.path=a .jsonl file of messages")]


def _check_text(data: DataConfig) -> list[UserError]:
    if not data.path:
        return [ConfigError("data.kind=text reads local files, and none is named", do="data.path=a file or a folder")]
    if data.heldout_path and Path(data.path).resolve() == Path(data.heldout_path).resolve():
        return [ConfigError(f"data.heldout_path and data.path are the same: {data.path}", do=HOLD_OUT)]
    return []


def _check_hub(data: DataConfig) -> list[UserError]:
    if not data.name:
        return [ConfigError("data.kind=hub reads a dataset, and none is named", do="data.name=Salesforce/wikitext")]
    if data.split == data.heldout_split:
        return [ConfigError(f"data.heldout_split and data.split are the same: {data.split}", do=HOLD_OUT)]
    return []
