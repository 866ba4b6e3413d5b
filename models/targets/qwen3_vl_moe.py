"""Qwen3-VL-MoE, which exists only as a wrapper with images: Qwen3's attention, experts in one transposed tensor."""

from models.targets.base import LAYER, MoETarget

TARGETS = (
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
