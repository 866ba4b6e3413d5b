"""Qwen2-MoE: Qwen2's attention with or without its biases, and a shared expert behind a gate σ(g·x)."""

from models.targets.base import LAYER, MoETarget

TARGETS = (
    MoETarget(
        model_type="qwen2_moe",
        architecture="Qwen2MoeForCausalLM",
        sources={"qwen2": 1, "llama": 3, "mistral": 3, "phi3": 3},
        config_keys=lambda given: {
            "num_experts": given.shape.experts,
            "moe_intermediate_size": given.width,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [*given.shape.dense_layers],
            "use_sliding_window": False,
            "sliding_window": None,
            "qkv_bias": given.dense["model_type"] == "qwen2",
            "shared_expert_intermediate_size": given.shared,
        },
        runtimes=("vLLM", "SGLang", "llama.cpp"),
        shared=LAYER + "mlp.shared_expert.{part}.weight",
        shared_router=LAYER + "mlp.shared_expert_gate.weight",
        expert_modules=("experts", "shared_expert", "shared_expert_gate"),
        dense_layers="any",
        always_has_shared=True,
        normalised=lambda _shape: False,  # the family does not renormalise, and llama.cpp cannot
        head_dim=False,  # in transformers 4
    ),
)
