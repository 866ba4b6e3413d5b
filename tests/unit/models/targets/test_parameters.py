"""Parameters counted from config.json alone equal those of the model that transformers builds."""

from dataclasses import replace

import pytest
import torch
from pico import FAMILIES, TWO_WIDTHS, decoder_of
from transformers import AutoConfig, AutoModelForCausalLM

import models.tiny_onn.register  # noqa: F401 - from_config is to know the class
from models.config import MoEShape
from models.finding import find_decoder
from models.source import EMBEDDED
from models.targets.config import MOE_TARGETS, select_target
from models.targets.config_json import count_carved, count_dense, emit_config
from stages.evaluate.comparison import count_parameters

SIZES = {
    "hidden_size": 24,
    "intermediate_size": 116,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "pad_token_id": 0,
}
SHAPE = MoEShape(experts=6, n=14, top_k=2, always_on=20)
# Families with a target of their own, and what their configuration needs to be small.
OWN_TARGETS = {
    "gemma4_text": {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 61},
    "cohere2": {},
    "ernie4_5": {},
    "glm": {"eos_token_id": 0},
    "granite_swa": {},
    "granitemoehybrid": {"shared_intermediate_size": 116, "num_local_experts": 0, "mamba_n_heads": 4},
    "hunyuan_v1_dense": {"head_dim": 6},
    "lfm2": {"block_auto_adjust_ff_dim": False},
}
PAIRS = [
    (source, name)
    for name in MOE_TARGETS
    for source in (*FAMILIES, *OWN_TARGETS)
    if MOE_TARGETS[name].rank(decoder_of(source, **OWN_TARGETS.get(source, {})))
]


def built(config):
    keys = {key: value for key, value in config.items() if key not in {"architectures", "auto_map"}}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(keys.pop("model_type"), **keys))


def carved(source, name, shape, pad_to=8):
    return built(emit_config(source, MOE_TARGETS[name], shape, "float32", pad_to, tied=source.tied))


KEYS = [{}, {"tie_word_embeddings": True}, {"attention_bias": True}, {"head_dim": 8}]
FIXED = {"qwen2", "granite", "phi3", "mistral"}  # in their attention


@pytest.mark.parametrize(
    ("family", "more"), [(family, more) for family in FAMILIES for more in KEYS[: 2 if family in FIXED else None]]
)
def test_a_dense_model(family, more):
    source = {"model_type": family, **SIZES, **more}
    count = count_dense(decoder_of(source))
    looked_up = 0 if more.get("tie_word_embeddings") or built(source).config.tie_word_embeddings else 61 * 24
    assert count.total == count.active + looked_up == built(source).num_parameters()
    assert count_parameters(built(source), SHAPE) == (count.total, count.active)


@pytest.mark.parametrize(("source", "name"), PAIRS)
def test_a_carved_model(source, name):
    config = decoder_of(source, **SIZES, **OWN_TARGETS.get(source, {}), tie_word_embeddings=True)
    target = MOE_TARGETS[name]
    shape = SHAPE if target.has_room(SHAPE) else replace(SHAPE, always_on=14 if target.has_shared else 0)
    model, count = carved(config, name, shape), count_carved(config, target, shape)
    copied = sum(buffer.numel() for place, buffer in model.named_buffers() if place.endswith("layer_scalar"))
    assert (count.total - copied, count.active - copied) == count_parameters(model, shape)
    assert count.total - copied == model.num_parameters()
    looked_up = 0 if model.config.tie_word_embeddings else 61 * 24
    looked_up += 61 * 3 * 4 if source == "gemma4_text" else 0  # embeddings of every layer
    assert count.total - count.active - looked_up == 3 * 4 * 3 * 16 * 24  # layers, experts, matrices, N to 16, D


def test_a_carve_whose_narrow_layers_stay_dense():
    source, shape = decoder_of("gemma4_text", **TWO_WIDTHS), replace(SHAPE, dense_layers=(0, 1))
    assert select_target(source, "auto", shape).is_tiny_onn
    count, model = count_carved(source, MOE_TARGETS["tiny_onn"], shape), carved(source, "tiny_onn", shape)
    scalars = source.depth  # of layers, which are buffers
    assert (count.total - scalars, count.active - scalars) == count_parameters(model, shape)


def test_the_embedded_model_and_its_default_carve():
    config, shape = find_decoder(EMBEDDED), MoEShape(16, 64, 4, 256)
    dense = AutoModelForCausalLM.from_pretrained(EMBEDDED, local_files_only=True)
    count = count_dense(config)
    assert count_parameters(dense, shape) == (count.total, count.active) == (4_983_552, 4_983_552)
    target = select_target(config, "auto", shape)
    for tied, total in ((True, 5_786_368), (False, 5_786_368 + 4096 * 256)):
        count = count_carved(config, target, shape, tied=tied)
        keys = emit_config(config, target, shape, "float32", tied=tied)
        assert count_parameters(built(keys), shape) == (count.total, count.active) == (total, 3_427_072)
