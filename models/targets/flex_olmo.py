"""FlexOlmo: OLMo 2's attention with norms after each part, no always-on neurons."""

from typing import Any

from models.config import MoEShape
from models.targets.base import ConfigInput, MoETarget, is_power_of_two


def _config_keys(given: ConfigInput) -> dict[str, Any]:
    return {
        "intermediate_size": given.width,
        "num_experts": given.shape.experts,
        "attention_bias": bool(given.dense.get("attention_bias")),
    }


def _normalised(shape: MoEShape) -> bool:
    """Not where 1/E is exact in every number format."""
    return shape.top_k > 1 and not is_power_of_two(shape.experts)


TARGETS = (
    MoETarget(
        model_type="flex_olmo",
        architecture="FlexOlmoForCausalLM",
        sources={"olmo2": 1},
        config_keys=_config_keys,
        runtimes=("vLLM",),
        normalised=_normalised,
        output_bias=True,
    ),
)
