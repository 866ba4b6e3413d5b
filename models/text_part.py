"""The text part of a model that sees images or hears, as a checkpoint of the class that its family has for text."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

from instruments.errors import ConfigError
from models.decoder import Decoder
from models.structure import build_empty, describe_model

_WITH_IMAGES = "assemble.text_only=false"


def text_part(folder: Path, whole: Decoder) -> Decoder:
    """The text decoder of a wrapper: names of the class for text, found on the disk in the wrapper's tensors.

    Raises ConfigError: the model is no wrapper, or transformers has no class that holds its text part alone.
    """
    if not whole.is_wrapper:
        raise _error(f"{whole.model_type} is text alone already")
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    text = config.get_text_config(decoder=True)
    if text is config or type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise _error(f"transformers has no class for the text part alone ({text.model_type})")
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(text)].__name__
    text.architectures, text.tie_word_embeddings = [model_class], whole.tied
    decoder = describe_model(build_empty(text), _config_json(whole, text.to_diff_dict(), model_class), {})
    places = {decoder.head: whole.head, decoder.embedding: whole.embedding}
    inner, outer = (each.layers.rpartition(".")[0] for each in (decoder, whole))
    for name in decoder.shapes.keys() - places.keys():
        places[name] = outer + name.removeprefix(inner) if name.startswith(f"{inner}.") else name
    if unlike := [name for name, place in places.items() if decoder.shapes.get(name) != whole.shapes.get(place)]:
        raise _error(f"{model_class} has other tensors than the text part, such as {min(unlike)}")
    stored = {name: whole.stored[place] for name, place in places.items() if place in whole.stored}
    return replace(decoder, stored=stored, tied=whole.tied)


def _config_json(whole: Decoder, text: Mapping[str, Any], model_class: str) -> dict[str, Any]:
    """config.json of the text part; a wrapper states tied embeddings, token ids and number format outside of it."""
    said = whole.config_json
    outside = {key: said[key] for key in ("dtype", "torch_dtype", "transformers_version") if key in said}
    named = {"architectures": [model_class], "model_type": text["model_type"], "tie_word_embeddings": whole.tied}
    return {**text, **said.get("text_config", {}), **whole.token_ids, **outside, **named}


def _error(what: str) -> ConfigError:
    return ConfigError(what, where="setting assemble.text_only", do=_WITH_IMAGES)
