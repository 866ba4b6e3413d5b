"""Qwen3.5-MoE and its wrapper with images: the dense family's hybrid attention; a shared expert behind σ(g·x)."""

from models.targets.base import LAYER, MoETarget

TARGETS = (
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
        partial_rotation=True,
    ),
)
