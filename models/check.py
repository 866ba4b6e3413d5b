"""Whether the dense source model can be carved, found without reading a weight: all faults at once."""

import json
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from instruments.errors import CheckpointError, ConfigError, UserError, some
from models.checkpoint import folder as checkpoint
from models.config import MEMORY, ModelConfig, setting_word
from models.dense import check_features, check_tensors, check_values, dense_family
from models.quantization import missing_bitsandbytes, stored_quantization
from models.source import check_hub_weights, config_folder, read_source_config


def check_source(model: ModelConfig) -> list[UserError]:
    """Errors for everything that prevents carving this source; a hub model's weights are checked when they are read."""
    if misplaced := [*check_kind(model)]:
        return [*misplaced]
    try:
        config = read_source_config(model)
    except UserError as error:
        return [error]
    entries: Mapping[str, checkpoint.Entry] = {}
    wrong_weights = check_hub_weights(model) if model.kind == "hub" else []
    if model.kind != "hub":
        entries, wrong_weights = checkpoint.check_shards(config_folder(model))
    errors = [*check_placement(model), *_check_config(model, config), *wrong_weights]
    if errors or model.kind == "hub":
        return errors
    packed = [name for name, entry in entries.items() if isinstance(entry, checkpoint.PackedEntry)]
    if packed and not stored_quantization(config):
        what = f"{len(packed)} weights are stored in 4 or 8 bits, and config.json says nothing of it"
        do = "copy quantization_config from the checkpoint's own config.json"
        return [CheckpointError(what, where=some(packed, 3, ", "), do=do)]
    return [*check_tensors({name: entry.shape for name, entry in entries.items()}, config, dense_family(config))]


def _check_config(model: ModelConfig, config: dict[str, Any]) -> list[UserError]:
    try:
        family = dense_family(config)
    except CheckpointError as error:
        return [error]
    wrong: list[UserError] = [*check_values(config)]
    if wrong:
        return wrong
    try:
        json.dumps(config, allow_nan=False)  # refuses NaN and Infinity, which 1e999 becomes, too
    except ValueError as error:
        where = f"config.json of {model.path or model.name}"
        return [CheckpointError(f"config.json is no JSON: {error}", where=where, do="download it again")]
    return [*check_quantization(model, config), *check_features(config, family)]


def check_kind(model: ModelConfig) -> Iterator[ConfigError]:
    """Yield an error if settings of one kind of source are given for another, which would ignore them."""
    where = f"model.kind={model.kind}"
    hub = {f"model.{name}": value for name in ("name", "revision") if (value := getattr(model, name))}
    if model.kind != "hub" and hub:
        what = f"only model=hub reads {' and '.join(f'{key}={value}' for key, value in hub.items())}"
        do = " ".join(["model=hub", *(setting_word(*pair) for pair in hub.items())])
        yield ConfigError(what, where=where, do=do if model.name else "model.revision=null")
    if model.kind != "local" and model.path:
        what, do = f"only model=local reads model.path={model.path}", setting_word("model.path", model.path)
        yield ConfigError(what, where=where, do=f"model=local {do}")


def check_quantization(model: ModelConfig, config: Mapping[str, Any]) -> Iterator[UserError]:
    """Yield an error for quantisation that the installation or the checkpoint does not support."""
    stored, asked = stored_quantization(config), model.quantization
    if stored not in {None, "nf4", "fp4", "int8"}:
        what, where = f"weights quantised by {stored} cannot be sliced", "quantization_config in config.json"
        yield CheckpointError(what, where=where, do="give the unquantised checkpoint, or one stored by bitsandbytes")
        return
    if stored and asked not in {"none", stored}:
        what = f"model.quantization={asked}, but the checkpoint is stored in {stored}"
        do = "model.quantization=none, which takes it as it is, or give the unquantised checkpoint"
        yield ConfigError(what, where="model.quantization", do=do)
    if (stored or asked != "none") and not find_spec("bitsandbytes"):
        yield missing_bitsandbytes(f"a checkpoint stored in {stored}" if stored else f"model.quantization={asked}")


def check_placement(model: ModelConfig) -> Iterator[ConfigError]:
    """Yield an error for memory limits that have no effect or are not written as an amount of memory."""
    for name in ("gpu_memory", "cpu_memory", "hidden_memory"):
        amount, where = getattr(model, name), f"model.{name}"
        if amount is None:
            continue
        if model.device_map == "none" and name != "hidden_memory":
            what = f"{where}={amount} has no effect on a model that is all on one device"
            yield ConfigError(what, where=where, do=f"model.device_map=auto {where}={amount}")
        if not MEMORY.fullmatch(amount):
            yield ConfigError(f"{where}={amount} is no amount of memory", where=where, do=f"{where}=20GiB")
