"""FlexOlmo: OLMo 2's attention, norms after attention and FFN, no always-on neurons."""

from models.targets.base import MoETarget, is_power_of_two

TARGETS = (
    MoETarget(
        model_type="flex_olmo",
        architecture="FlexOlmoForCausalLM",
        sources={"olmo2": 1},
        config_keys=lambda given: {
            "intermediate_size": given.width,
            "num_experts": given.shape.experts,
            "attention_bias": bool(given.dense.get("attention_bias")),
        },
        runtimes=("vLLM",),
        # 1/E is exact in every number format if E is a power of two.
        normalised=lambda shape: shape.top_k > 1 and not is_power_of_two(shape.experts),
        output_bias=True,
    ),
)
