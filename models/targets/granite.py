"""Granite-MoE with and without always-on neurons: Granite's attention and multipliers, experts in packed tensors."""

from dataclasses import replace
from typing import Any

from models.targets.base import LAYER, ConfigInput, MoETarget

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

TARGETS = (
    _GRANITE,
    replace(
        _GRANITE,
        model_type="granitemoeshared",
        architecture="GraniteMoeSharedForCausalLM",
        sources={"granite": 2},
        runtimes=("vLLM", "llama.cpp"),
        expert_modules=("experts", "shared_mlp"),
        packed_shared=(LAYER + "shared_mlp.input_linear.weight", LAYER + "shared_mlp.output_linear.weight"),
    ),
)
