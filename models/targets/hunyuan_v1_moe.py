"""Hunyuan's Mixture-of-Experts: one shared expert without a gate, which is as wide as the others."""

from models.targets.base import LAYER, MoETarget

TARGETS = (
    MoETarget(
        model_type="hunyuan_v1_moe",
        architecture="HunYuanMoEV1ForCausalLM",
        sources={"hunyuan_v1_dense": 1},
        config_keys=lambda given: {
            "attention_bias": bool(given.dense.get("attention_bias")),
            "intermediate_size": given.width,
            "num_experts": given.shape.experts,
            # For vLLM and SGLang, and as lists for llama.cpp.
            **dict.fromkeys(("moe_topk", "num_experts_per_tok"), [given.shape.top_k] * given.decoder.depth),
            "moe_intermediate_size": [given.width] * given.decoder.depth,
            "num_shared_expert": [1] * given.decoder.depth,
            "use_mixed_mlp_moe": True,
            "use_qk_norm": True,
        },
        runtimes=("vLLM", "SGLang", "llama.cpp"),
        router=LAYER + "mlp.gate.wg.weight",
        shared=LAYER + "mlp.shared_mlp.{part}.weight",
        router_module="gate.wg",
        expert_modules=("experts", "shared_mlp"),
        always_has_shared=True,
        shared_as_experts=True,
        one_shared_expert=True,
        norm_key=False,
        output_bias=True,
        llama_cpp_output_bias=True,
    ),
)
