"""GLM-4-MoE and dots.llm1: shared experts without a gate; dots.llm1 has Qwen3's biases and windows in some layers."""

from dataclasses import replace
from typing import Any

from models.targets.base import LAYER, ConfigInput, MoETarget, several_chosen


def _expert_keys(given: ConfigInput) -> dict[str, Any]:
    """Keys of config.json for the experts."""
    return {
        "n_routed_experts": given.shape.experts,
        "moe_intermediate_size": given.width,
        "n_shared_experts": given.shared // given.width,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": len(given.shape.dense_layers),
    }


def _dots1_keys(given: ConfigInput) -> dict[str, Any]:
    dense, layers = given.dense, range(int(given.dense["num_hidden_layers"]))
    # Qwen3 uses its window only with `use_sliding_window`, dots.llm1 always.
    window = dense.get("sliding_window", 4096) if dense.get("use_sliding_window") else None
    first = int(dense.get("max_window_layers", 28)) if window is not None else len(layers)
    kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in layers]
    if window is not None and dense.get("layer_types"):
        kinds = list(dense["layer_types"])
    return _expert_keys(given) | {
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        # vLLM also multiplies the shared experts by it, so the scale goes into the down projections.
        "routed_scaling_factor": 1.0,
        "attention_bias": bool(dense.get("attention_bias")),
        "sliding_window": window,
        "max_window_layers": dense.get("max_window_layers", 28),
        "layer_types": kinds,
    }


_GLM4_MOE = MoETarget(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    sources={"qwen3": 2, "qwen2": 2, "llama": 2, "mistral": 2, "phi3": 2},
    config_keys=lambda given: {
        **_expert_keys(given),
        "num_nextn_predict_layers": 0,
        "attention_bias": given.dense["model_type"] == "qwen2",
        "use_qk_norm": given.dense["model_type"] == "qwen3",
        # The architecture rotates half of each head if this key is missing, so it is at both levels.
        "partial_rotary_factor": 1.0,
        "rope_parameters": given.dense["rope_parameters"] | {"partial_rotary_factor": 1.0},
    },
    runtimes=("vLLM", "SGLang", "llama.cpp"),
    runtime_note="llama.cpp's own converter wants GLM's special tokens and stops at [gMASK]; "
    "`python -m pipeline gguf` runs it with the vocabulary as it is.",
    shared=LAYER + "mlp.shared_experts.{part}.weight",
    expert_modules=("experts", "shared_experts"),
    dense_layers="first",
    always_has_shared=True,
    shared_as_experts=True,  # config.json counts shared experts, each as wide as a routed one
    selection_bias=LAYER + "mlp.gate.e_score_correction_bias",
    selection_bias_scale=0.25,  # it chooses by σ(z) + bias, and σ(z) ≈ ½ + z/4 for small logits z
    scoring="sigmoid",
    normalised=several_chosen,
    factor_key=True,
    least_experts=2,
)
TARGETS = (
    _GLM4_MOE,
    replace(
        _GLM4_MOE,
        model_type="dots1",
        architecture="Dots1ForCausalLM",
        sources={"qwen3": 3},
        config_keys=_dots1_keys,
        runtime_note="vLLM and llama.cpp give this architecture no sliding window and no bias on o_proj: serve such a "
        "source by transformers.",
        llama_cpp_equal_heads=True,
        factor_key=False,
        output_bias=True,
        layer_windows=True,
    ),
)
