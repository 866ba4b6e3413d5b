"""Qwen3-MoE: Qwen3's attention, no always-on neurons."""

from models.targets.base import MoETarget

TARGETS = (
    MoETarget(
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        sources={"qwen3": 1},
        config_keys=lambda given: {
            "num_experts": given.shape.experts,
            "moe_intermediate_size": given.width,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [*given.shape.dense_layers],
            "use_sliding_window": False,
            "sliding_window": None,
            "attention_bias": bool(given.dense.get("attention_bias")),
        },
        runtimes=("vLLM", "SGLang", "llama.cpp"),
        dense_layers="any",
        output_bias=True,
    ),
)
