"""Granite-MoE: Granite's attention and multipliers, always-on neurons without a gate, experts in packed tensors.

With sliding windows (SWA), each layer has its own window and base of rotation, or none; the hybrid's layers are Mamba
or attention.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from models.config import MoEShape
from models.decoder import Decoder
from models.targets.base import LAYER, ConfigInput, Constant, MoETarget

_MULTIPLIERS = ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier")


def _config_keys(given: ConfigInput) -> dict[str, Any]:
    return {
        "intermediate_size": given.width,
        "num_local_experts": given.shape.experts,
        # granitemoe has no shared expert and ignores this key.
        "shared_intermediate_size": given.shared,
        "attention_bias": bool(given.dense.get("attention_bias")),
        **{name: given.dense.get(name, 1.0) for name in _MULTIPLIERS},
    }


def _swa_keys(given: ConfigInput) -> dict[str, Any]:
    dense, depth = given.dense, given.decoder.depth
    rotated = dense.get("no_rope_layers") or [1] * depth  # SmolLM3's name; 1 where positions are rotated
    thetas = dense.get("layer_rope_theta") or [dense["rope_theta"] if turned else 0 for turned in rotated[:depth]]
    width = int(dense.get("head_dim") or given.decoder.hidden // dense["num_attention_heads"])
    base = {"rope_theta": max(thetas) or dense["rope_theta"]}
    return {
        **_config_keys(given),
        "attention_multiplier": dense.get("attention_multiplier", width**-0.5),
        "layer_types": dense["layer_types"],
        # Read in any case.
        "sliding_window": dense.get("sliding_window") or dense["max_position_embeddings"],
        "layer_rope_theta": thetas,
        # llama.cpp's names of the same.
        "no_rope_layers": [int(theta != 0) for theta in thetas],
        **base,
        "rope_parameters": dense["rope_parameters"] | base,
    }


def _lacking(config: Mapping[str, Any]) -> dict[str, str]:
    bases = {*(config.get("layer_rope_theta") or config.get("no_rope_layers") or ())}
    width, lacking = config.get("head_dim"), {}
    if len(bases) > 1 or bases == {0}:
        lacking["vLLM"] = "rotates the positions of all layers alike"
    if len(bases - {0}) > 1:
        lacking["llama.cpp"] = "rotates all layers by one base"
    if width and width * config["num_attention_heads"] != config["hidden_size"]:
        lacking["llama.cpp"] = "has only heads of hidden_size / heads for this architecture"
    return lacking


def _hybrid_keys(given: ConfigInput) -> dict[str, Any]:
    kinds = {"linear_attention": "mamba", "full_attention": "attention"}  # llama.cpp knows these names
    return {
        "intermediate_size": given.width,
        "num_local_experts": given.shape.experts,
        "shared_intermediate_size": given.shared,
        "layer_types": [kinds.get(kind, kind) for kind in given.dense["layer_types"]],
    }


def _sinks(dense: Decoder, _shape: MoEShape) -> dict[str, Constant]:
    """Attention sinks that take nothing, if the dense family has none; their gradients are 0."""
    name = LAYER + "self_attn.sinks"
    here = any(tensor.endswith("self_attn.sinks") for tensor in dense.shapes)
    return {} if here else {name: Constant((int(dense.config["num_attention_heads"]),), -1e4)}


_GRANITE = MoETarget(
    model_type="granitemoe",
    architecture="GraniteMoeForCausalLM",
    sources={"granite": 1},
    config_keys=_config_keys,
    runtimes=("vLLM", "SGLang", "llama.cpp"),
    router=LAYER + "block_sparse_moe.router.layer.weight",
    packed=(LAYER + "block_sparse_moe.input_linear.weight", LAYER + "block_sparse_moe.output_linear.weight"),
    router_module="router",
    ffn_modules=("block_sparse_moe", "shared_mlp"),
    norm_key=False,
    output_bias=True,
    llama_cpp_output_bias=True,
    head_dim=False,
)

_SHARED = replace(
    _GRANITE,
    model_type="granitemoeshared",
    architecture="GraniteMoeSharedForCausalLM",
    sources={"granite": 2},
    runtimes=("vLLM", "llama.cpp"),
    expert_modules=("experts", "shared_mlp"),
    packed_shared=(LAYER + "shared_mlp.input_linear.weight", LAYER + "shared_mlp.output_linear.weight"),
)

TARGETS = (
    _GRANITE,
    _SHARED,
    replace(
        _SHARED,
        model_type="granitemoe_swa",
        architecture="GraniteMoeSWAForCausalLM",
        sources={"granite_swa": 1, "smollm3": 1, "cwm": 1, "ministral": 1},
        config_keys=_swa_keys,
        transformers_4=False,
        runtimes=("vLLM", "SGLang", "llama.cpp"),
        router=LAYER + "block_sparse_moe.router.weight",
        packed=(LAYER + "block_sparse_moe.experts.gate_up_proj", LAYER + "block_sparse_moe.experts.down_proj"),
        more=_sinks,
        layer_windows=True,
        head_dim=True,
        llama_cpp_windows=True,
        lacks=_lacking,
    ),
    replace(
        _SHARED,
        model_type="granitemoehybrid",
        architecture="GraniteMoeHybridForCausalLM",
        sources={"granitemoehybrid": 1},
        carries=True,
        config_keys=_hybrid_keys,
        runtimes=("vLLM", "SGLang", "llama.cpp"),
        always_has_shared=True,
        lacks=_lacking,
    ),
)
