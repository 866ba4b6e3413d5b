"""dots.llm1: GLM-4-MoE's experts, with Qwen3's attention, its biases, and windows in some layers."""

from dataclasses import replace
from typing import Any

from models.targets.base import ConfigInput
from models.targets.glm4_moe import GLM4_MOE, expert_keys


def _config_keys(given: ConfigInput) -> dict[str, Any]:
    dense, layers = given.dense, range(int(given.dense["num_hidden_layers"]))
    # Qwen3 uses its window only with `use_sliding_window`, dots.llm1 always.
    window = dense.get("sliding_window", 4096) if dense.get("use_sliding_window") else None
    first = int(dense.get("max_window_layers", 28)) if window is not None else len(layers)
    kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in layers]
    if window is not None and dense.get("layer_types"):
        kinds = list(dense["layer_types"])
    return expert_keys(given) | {
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        # vLLM also multiplies the shared experts by it, so the scale goes into the down projections.
        "routed_scaling_factor": 1.0,
        "attention_bias": bool(dense.get("attention_bias")),
        "sliding_window": window,
        "max_window_layers": dense.get("max_window_layers", 28),
        "layer_types": kinds,
    }


TARGETS = (
    replace(
        GLM4_MOE,
        model_type="dots1",
        architecture="Dots1ForCausalLM",
        sources={"qwen3": 3},
        config_keys=_config_keys,
        runtime_note="vLLM and llama.cpp give this architecture no sliding window and no bias on o_proj: serve such a "
        "source by transformers.",
        llama_cpp_equal_heads=True,
        factor_key=False,
        output_bias=True,
        layer_windows=True,
    ),
)
