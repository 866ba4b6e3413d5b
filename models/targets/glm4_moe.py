"""GLM-4-MoE: Llama's, Qwen2's or Qwen3's attention, and shared experts without a gate."""

from typing import Any

from models.targets.base import LAYER, ConfigInput, MoETarget, several_chosen


def expert_keys(given: ConfigInput) -> dict[str, Any]:
    """Keys of config.json for the experts."""
    return {
        "n_routed_experts": given.shape.experts,
        "moe_intermediate_size": given.width,
        "n_shared_experts": given.shared // given.width,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": len(given.shape.dense_layers),
    }


GLM4_MOE = MoETarget(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    sources={"qwen3": 2, "qwen2": 2, "llama": 2, "mistral": 2, "phi3": 2},
    config_keys=lambda given: {
        **expert_keys(given),
        "num_nextn_predict_layers": 0,
        "attention_bias": given.dense["model_type"] == "qwen2",
        "use_qk_norm": given.dense["model_type"] == "qwen3",
        # The architecture rotates half of each head if this key is missing, so it is at both levels.
        "partial_rotary_factor": 1.0,
        "rope_parameters": given.dense["rope_parameters"] | {"partial_rotary_factor": 1.0},
    },
    runtimes=("vLLM", "SGLang", "llama.cpp"),
    runtime_note="llama.cpp's own converter wants GLM's special tokens and stops at [gMASK]; `python -m "
    "pipeline.gguf` runs it with the vocabulary as it is.",
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
TARGETS = (GLM4_MOE,)
