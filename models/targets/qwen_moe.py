"""Qwen2-MoE (a shared expert behind a gate σ(g·x)), Qwen3-MoE (no always-on neurons), and those that see images.

Qwen3.5-MoE and its wrapper have the dense family's hybrid attention, and a shared expert behind σ(g·x). Qwen3-VL-MoE
exists only as a wrapper: Qwen3's attention, experts in one transposed tensor.
"""

from typing import Any

from models.targets.base import LAYER, ConfigInput, MoETarget


def _expert_keys(given: ConfigInput) -> dict[str, Any]:
    return {
        "num_experts": given.shape.experts,
        "moe_intermediate_size": given.width,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [*given.shape.dense_layers],
        "use_sliding_window": False,
        "sliding_window": None,
    }


TARGETS = (
    MoETarget(
        model_type="qwen2_moe",
        architecture="Qwen2MoeForCausalLM",
        sources={"qwen2": 1, "llama": 3, "exaone": 3, "mistral": 3, "phi3": 3},
        config_keys=lambda given: (
            _expert_keys(given)
            | {"qkv_bias": given.dense["model_type"] == "qwen2", "shared_expert_intermediate_size": given.shared}
        ),
        runtimes=("vLLM", "SGLang", "llama.cpp"),
        needs_head=("SGLang", "llama.cpp"),
        shared=LAYER + "mlp.shared_expert.{part}.weight",
        shared_router=LAYER + "mlp.shared_expert_gate.weight",
        expert_modules=("experts", "shared_expert", "shared_expert_gate"),
        dense_layers="any",
        always_has_shared=True,
        normalised=lambda _shape: False,  # the family does not renormalise, and llama.cpp cannot
        head_dim=False,  # in transformers 4
    ),
    MoETarget(
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        sources={"qwen3": 1},
        config_keys=lambda given: _expert_keys(given) | {"attention_bias": bool(given.dense.get("attention_bias"))},
        runtimes=("vLLM", "SGLang", "llama.cpp"),
        needs_head=("SGLang",),
        dense_layers="any",
        output_bias=True,
    ),
    MoETarget(
        model_type="qwen3_5_moe_text",
        architecture="Qwen3_5MoeForCausalLM",
        sources={"qwen3_5_text": 1},
        wrappers={"qwen3_5": ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe")},
        carries=True,
        config_keys=lambda given: {
            "num_experts": given.shape.experts,
            "moe_intermediate_size": given.width,
            "shared_expert_intermediate_size": given.shared,
            # The dense model's layer for the second next token is left out: the family's own has experts.
            "mtp_num_hidden_layers": 0,
        },
        transformers_4=False,
        runtimes=("vLLM", "SGLang", "llama.cpp"),
        packed=(LAYER + "mlp.experts.gate_up_proj", LAYER + "mlp.experts.down_proj"),
        shared=LAYER + "mlp.shared_expert.{part}.weight",
        shared_router=LAYER + "mlp.shared_expert_gate.weight",
        expert_modules=("experts", "shared_expert", "shared_expert_gate"),
        always_has_shared=True,
    ),
    MoETarget(
        model_type="qwen3_vl_moe_text",
        architecture="Qwen3VLMoeForConditionalGeneration",
        sources={"qwen3_vl_text": 1},
        wrappers={"qwen3_vl": ("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe")},
        carries=True,
        config_keys=lambda given: {
            "num_experts": given.shape.experts,
            "moe_intermediate_size": given.width,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [*given.shape.dense_layers],
        },
        transformers_4=False,
        runtimes=("vLLM", "SGLang", "llama.cpp"),
        packed=(LAYER + "mlp.experts.gate_up_proj", LAYER + "mlp.experts.down_proj"),
        transposed=True,
        dense_layers="any",
    ),
)
