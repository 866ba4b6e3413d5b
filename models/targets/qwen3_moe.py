"""Qwen3-MoE: Qwen3's attention, no always-on neurons."""

from typing import Any

from models.targets.base import ConfigInput, MoETarget


def _config_keys(given: ConfigInput) -> dict[str, Any]:
    return {
        "num_experts": given.shape.experts,
        "moe_intermediate_size": given.width,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
        "sliding_window": None,
        "attention_bias": bool(given.dense.get("attention_bias")),
    }


TARGETS = (
    MoETarget(
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        sources={"qwen3": 1},
        config_keys=_config_keys,
        runtimes=("vLLM", "SGLang", "llama.cpp"),
        output_bias=True,
    ),
)
