"""Tiny random checkpoints of the language models in transformers, shrunk by the names in types.yaml."""

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from torch import nn
from torch.nn.modules.conv import _ConvNd
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.pytorch_utils import Conv1D
from zoo.next_month import MODEL_TYPE, register

from models.source import EMBEDDED

IMAGE = "_image"  # ends the name of an image-text model
LARGEST = 20_000_000  # parameters; a model above it was not shrunk

_DATA = yaml.safe_load(Path(__file__).with_name("types.yaml").read_text())
KEYS: dict[str, dict[str, Any]] = _DATA["types"]
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = _DATA["variants"]
CARVED: dict[str, list[str]] = _DATA["carved"]  # natively, as_tiny_onn
UNBUILT: dict[str, str] = _DATA["unbuilt"]  # type → why it cannot be built
_TEXT, _ENCODER = (
    {name: value for value, names in _DATA[part].items() for name in names} for part in ("text", "encoder")
)
# Keys that name the configuration of an encoder; keys whose value is a token of an image or a sound.
_ENCODERS = re.compile("vision|audio|visual|vq|encoder")
_TOKENS = re.compile(r"(image|img|video|audio|vision|bo[ia]|eo[ia]|eoa|boa|soi).*_(id|index)$")
_NORM_OF_QUERIES = re.compile(r"\b(q|k|query|key)_(layer)?norm")


@cache
def vocabulary() -> int:
    """Tokens of the embedded model, whose tokenizer all checkpoints have."""
    return int(json.loads((EMBEDDED / "config.json").read_text())["vocab_size"])


def names_of_types() -> list[str]:
    """All types: causal language models, variants, and image-text models that are another class."""
    causal, images = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), dict(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    twice = {name for name in causal if causal[name] == images.get(name)}
    known = [name for name in causal if name not in twice]
    return [*known, *VARIANTS, MODEL_TYPE, *(f"{name}{IMAGE}" for name in images)]


def shrunk_config(name: str) -> PretrainedConfig:
    """The small configuration of a type or a variant."""
    register()
    model_type, own = VARIANTS.get(name, (name.removesuffix(IMAGE), {}))
    whole = CONFIG_MAPPING[model_type]
    own = own or KEYS.get(name, KEYS.get(model_type, {}))
    return whole(**_merged(dict(small_keys(whole(), _TEXT)), own))


def small_keys(config: PretrainedConfig, sizes: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Those keys of a configuration, and of the configurations in it, that have a small value."""
    words = ("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size")
    sizes = {**sizes, **dict.fromkeys(words, vocabulary())}
    if "kv_lora_rank" in vars(config):  # keys and values of all heads come out of the compressed ones
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    if "qk_rope_head_dim" in vars(config):  # the others' size follows
        del sizes["head_dim"]
    special = 0
    for key, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            inner = small_keys(value, _ENCODER if _ENCODERS.search(key) else _TEXT)
            yield key, {"model_type": value.model_type, **dict(inner)}
        elif key in sizes and (value is not None or key in {"head_dim", "num_key_value_heads"}):
            yield key, [sizes[key]] * len(value) if _is_short_list(value) else sizes[key]
        elif key in {"layer_types", "mlp_layer_types"} and isinstance(value, list | tuple) and value:
            layers = sizes["num_hidden_layers"]
            yield key, ([*dict.fromkeys(value)] * layers)[:layers]  # every kind of layer
        elif isinstance(value, int) and _TOKENS.search(key):
            special += 1
            yield key, vocabulary() - special
    stored = config.to_dict()
    for key in config.attribute_map.values():
        if key in sizes and stored.get(key) is not None:
            yield key, sizes[key]


def _is_short_list(value: Any) -> bool:
    """Whether this is a list, but not one by layers."""
    return isinstance(value, list | tuple) and len(value) <= 4


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Both, nested; values of the second win."""
    found = dict(first)
    for key, value in second.items():
        nested = isinstance(value, Mapping) and isinstance(found.get(key), Mapping)
        found[key] = _merged(found[key], value) if nested else value
    return found


def build(name: str) -> PreTrainedModel:
    """The model with random weights, fp32."""
    auto = transformers.AutoModelForImageTextToText if name.endswith(IMAGE) else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in auto.from_config(shrunk_config(name)).parameters())
    assert size <= LARGEST, f"{size:,} parameters"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = auto.from_config(shrunk_config(name), dtype=torch.float32).eval()
        draw_weights(model)
    return model


@torch.no_grad()
def draw_weights(model: PreTrainedModel) -> None:
    """Draw weights with which every FFN matters, no term vanishes, and rounding in fp32 stays far below 1e-5.

    So layers change the residual stream by about its own size, and attention is not sharp. Norms, biases and scalars
    are near their initial values.
    """
    head, drawn = model.get_output_embeddings(), set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in drawn:
                continue
            drawn.add(id(parameter))
            if isinstance(module, nn.Embedding) and parameter.ndim == 2:
                parameter.normal_(std=4 * parameter.shape[1] ** -0.5)
            elif parameter.ndim >= 2:
                inputs = parameter.shape[0] if isinstance(module, Conv1D) else parameter.shape[-1]
                inputs = parameter[0].numel() if isinstance(module, _ConvNd) else inputs
                parameter.normal_(std=(1 if module is head else 0.5) * inputs**-0.5)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
                parameter.mul_(0.5 if _NORM_OF_QUERIES.search(f"{path}.{name}") else 1)


def write_checkpoint(name: str, folder: Path) -> Path:
    """Write the checkpoint of a type with the embedded model's tokenizer; returns the folder."""
    build(name).save_pretrained(folder)
    for path in EMBEDDED.glob("*token*"):
        shutil.copyfile(path, folder / path.name)
    shutil.copyfile(EMBEDDED / "chat_template.jinja", folder / "chat_template.jinja")
    return folder
