"""Command A with experts, whose output is averaged with that of the shared experts; windows in some layers."""

from collections.abc import Mapping
from typing import Any

from models.targets.base import LAYER, ConfigInput, MoETarget, several_chosen


def _config_keys(given: ConfigInput) -> dict[str, Any]:
    dense, kept = given.dense, given.shape.dense_layers
    return {
        "head_dim": given.decoder.hidden // int(dense["num_attention_heads"]),
        "layer_types": dense["layer_types"],
        # Its class does not read the older spelling, which the dense one does.
        "rope_parameters": dense["rope_parameters"],
        "rope_scaling": None,
        "mlp_layer_types": ["dense" if layer in kept else "sparse" for layer in range(given.decoder.depth)],
        "prefix_dense_intermediate_size": given.decoder.width,
        # Dense layers have the windows and rotation of all others.
        "prefix_dense_sliding_window_pattern": 0,
        "intermediate_size": given.width,
        "num_experts": given.shape.experts,
        "num_shared_experts": given.shared // given.width,
        # llama.cpp has no others.
        "shared_expert_combination_strategy": "average",
        "expert_selection_fn": "sigmoid",
    }


def _lacking(config: Mapping[str, Any]) -> dict[str, str]:
    kinds = list(config.get("mlp_layer_types") or ())
    late = "dense" in kinds[kinds.index("sparse") :] if "sparse" in kinds else False
    return {"llama.cpp": "runs dense layers only before all others"} if late else {}


TARGETS = (
    MoETarget(
        model_type="cohere2_moe",
        architecture="Cohere2MoeForCausalLM",
        sources={"cohere2": 1},
        carries=True,
        config_keys=_config_keys,
        transformers_4=False,
        runtimes=("vLLM", "SGLang", "llama.cpp"),
        llama_cpp_ropes=("default",),
        lacks=_lacking,
        shared=LAYER + "mlp.shared_experts.{part}.weight",
        expert_modules=("experts", "shared_experts"),
        dense_layers="any",
        always_has_shared=True,
        shared_as_experts=True,
        scoring="sigmoid",
        normalised=several_chosen,
        output_scale=2.0,
        output_bias=True,
    ),
)
