"""Whether the dense source model can be carved, found without reading a layer's weights: all faults at once."""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from instruments.dtypes import FLOATING
from instruments.errors import CheckpointError, ConfigError, UserError, some
from models.checkpoint import folder as checkpoint
from models.checkpoint.mistaken import explain_names
from models.config import ModelConfig
from models.decoder import Decoder
from models.finding import description_path, source_decoder
from models.quantization import DECODED, missing_bitsandbytes, stored_quantization
from models.source import check_hub_weights, config_folder, explained_config, read_config

_MOST_LAYERS = 1000  # published models have up to 130


def check_source(model: ModelConfig) -> list[UserError]:
    """Errors for everything that prevents carving this source; a hub model's weights are checked when they are read."""
    try:
        config = read_config(config_folder(model))
    except UserError as error:
        return [error]
    entries: Mapping[str, checkpoint.Entry] = {}
    wrong_weights = check_hub_weights(model) if model.kind == "hub" else []
    if model.kind != "hub":
        entries, wrong_weights = checkpoint.check_shards(config_folder(model))
    if stored_quantization(config) not in DECODED:  # its tensors are odd, and that is the reason
        wrong_weights = []
    errors: list[UserError] = []
    try:
        with explained_config(f"config.json of {model.path or model.name or model.kind}"):
            errors += [*_check_config(model, config, len(entries)), *wrong_weights]
            if not errors:
                decoder = source_decoder(model)
                errors += _check_weights(config, decoder, entries) if entries else []
                if entries and not errors:
                    _check_stream(config_folder(model))
    except UserError as error:
        errors.append(error)
    return errors


def _check_stream(folder: Path) -> None:
    """Open the stream of a checkpoint's layers, once. Raises CheckpointError: they do not run one by one."""
    mark = description_path(folder, weights=True, text_only=False).with_suffix(".runs")
    if not mark.exists():
        import torch  # noqa: PLC0415 - a plan of a known model does without it

        from models.stream import LayerStream  # noqa: PLC0415

        LayerStream(folder, device=torch.device("cpu")).reader.close()
        with suppress(OSError):
            mark.touch()


def _check_weights(
    config: Mapping[str, Any], decoder: Decoder, entries: Mapping[str, checkpoint.Entry]
) -> list[CheckpointError]:
    packed = [name for name, entry in entries.items() if isinstance(entry, checkpoint.PackedEntry)]
    if packed and not stored_quantization(config):
        what = f"{len(packed)} weights are stored in 4 or 8 bits, and config.json says nothing of it"
        do = "copy quantization_config from the checkpoint's own config.json"
        return [CheckpointError(what, where=some(packed, 3, ", "), do=do)]
    if not packed and (stored := stored_quantization(config)):
        what = f"config.json says that the weights are stored in {stored}, and none is"
        do = "remove quantization_config from config.json, or download the weights again"
        return [CheckpointError(what, where="quantization_config in config.json", do=do)]
    if mistaken := explain_names(entries):
        return [mistaken]
    return check_tensors(decoder, {name: entry.shape for name, entry in entries.items()})


def _check_config(model: ModelConfig, config: dict[str, Any], tensors: int) -> list[UserError]:
    if wrong := check_layers(config, tensors):
        return [*wrong]
    try:
        json.dumps(config, allow_nan=False)  # refuses NaN and Infinity, which 1e999 becomes, too
    except ValueError as error:
        where = f"config.json of {model.path or model.name}"
        return [CheckpointError(f"config.json is no JSON: {error}", where=where, do="download it again")]
    return [*check_quantization(model, config), *check_features(config)]


def check_layers(config: Mapping[str, Any], tensors: int) -> list[CheckpointError]:
    """Errors for more layers than there are `tensors` on disk (0: unknown): they would be built before a comparison."""
    text = config.get("text_config")
    stated = {**config, **(text if isinstance(text, Mapping) else {})}
    counts = {key: stated[key] for key in ("num_hidden_layers", "num_layers", "n_layer") if key in stated}
    wrong = [
        f"{key}={count}" for key, count in counts.items() if type(count) is int and count > (tensors or _MOST_LAYERS)
    ]
    what, do = "config.json says more layers than the weights are of", "download or copy it again"
    return [CheckpointError(what, where=", ".join(wrong)[:200], do=do)] if wrong else []


def check_features(config: Mapping[str, Any]) -> Iterator[CheckpointError]:
    """Yield errors for features that no MoE can express."""
    text = config.get("text_config") or config
    # In embedding models a token may see the one that it should predict. Of a model that sees images this may mean
    # tokens of an image, or of a prompt with one, as in PaliGemma: `check_causal` tries it on text alone.
    causal = {"is_causal": text.get("is_causal", True)}
    causal["use_bidirectional_attention"] = config.get("use_bidirectional_attention") in {None, False, "vision"}
    for key in (key for key, holds in causal.items() if not holds):
        what, do = "with attention to later tokens this is no model of the next token", "choose a causal language model"
        yield CheckpointError(what, where=f"{key} in config.json", do=do)
    named = str(text.get("dtype") or text.get("torch_dtype") or "float32").removeprefix("torch.")
    if named not in FLOATING or named == "float64":
        do = "load it in float32 with transformers, write it by save_pretrained, and carve that"
        what = f"transformers' kernels for experts have no {named}"
        yield CheckpointError(what, where="dtype in config.json", do=do)


def check_tensors(decoder: Decoder, shapes: Mapping[str, tuple[int, ...]]) -> list[CheckpointError]:
    """Errors for tensors on disk that are missing, unknown, or not of the shape that config.json says."""
    problems: dict[str, list[str]] = {
        "tensors are missing": [
            name for name in decoder.shapes if not (decoder.stored.get(name) or (name == decoder.head and decoder.tied))
        ],
        "tensors are unknown to this architecture": list(decoder.unknown),
        "tensors do not have the shape that config.json says": [],
    }
    for name, parts in decoder.stored.items():
        found = [shapes[part] for part in parts]
        joined = (sum(shape[0] for shape in found), *found[0][1:]) if len(found) > 1 else found[0]
        # A tied head may be stored, too; transformers compares it with the embeddings.
        wanted = decoder.shapes.get(decoder.embedding if decoder.tied and name == decoder.head else name, joined)
        if joined != wanted:
            problems["tensors do not have the shape that config.json says"].append(
                f"{parts[0]} is {joined}, not {wanted}"
            )
    errors = []
    for what, names in problems.items():
        where = ", ".join(name[:200] for name in names[:3]) + (" ..." if len(names) > 3 else "")
        do = "check that config.json belongs to these weights"
        errors += [CheckpointError(f"{len(names)} {what}", where=where, do=do)] if names else []
    return errors


def check_quantization(model: ModelConfig, config: Mapping[str, Any]) -> Iterator[UserError]:
    """Yield an error for quantisation that the installation or the checkpoint does not support."""
    stored, asked = stored_quantization(config), model.quantization
    if stored not in DECODED:
        what, where = f"weights quantised by {stored} cannot be sliced", "quantization_config in config.json"
        yield CheckpointError(what, where=where, do="give the unquantised model, or one in FP8 or of bitsandbytes")
        return
    if stored and asked not in {"none", stored}:
        what = f"model.quantization={asked}, but the checkpoint is stored in {stored}"
        do = "model.quantization=none, which takes it as it is, or give the unquantised checkpoint"
        yield ConfigError(what, where="model.quantization", do=do)
    if (stored not in {None, "fp8"} or asked != "none") and not find_spec("bitsandbytes"):
        yield missing_bitsandbytes(f"a checkpoint stored in {stored}" if stored else f"model.quantization={asked}")
