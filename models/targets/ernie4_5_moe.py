"""ERNIE 4.5 with experts: shared experts without a gate, dense layers before and after the others, no biases at all."""

from collections.abc import Mapping
from typing import Any

from models.targets.base import LAYER, ConfigInput, Constant, MoETarget


def _config_keys(given: ConfigInput) -> dict[str, Any]:
    dense_layers, width = given.shape.dense_layers, given.decoder.width
    carved = [layer for layer in range(given.decoder.depth) if layer not in dense_layers]
    if not dense_layers:
        # No other layer reads it, and llama.cpp takes the width of the shared experts to be this one ÷ key heads.
        width = given.shared * int(given.dense["num_key_value_heads"]) or width
    return {
        "intermediate_size": width,
        "moe_num_experts": given.shape.experts,
        "moe_k": given.shape.top_k,
        "moe_intermediate_size": given.width,
        "moe_num_shared_experts": given.shared // given.width,
        "moe_layer_start_index": carved[0],
        "moe_layer_end_index": carved[-1],
        "moe_layer_interval": 1,
        "use_bias": False,
    }


def _lacking(config: Mapping[str, Any]) -> dict[str, str]:
    if config.get("moe_layer_end_index", -1) + 1 not in {0, config.get("num_hidden_layers")}:
        return {"llama.cpp": "runs dense layers only before all others"}
    shared = config.get("moe_num_shared_experts", 0) * config.get("moe_intermediate_size", 0)
    if shared and shared * config["num_key_value_heads"] != config["intermediate_size"]:
        return {"llama.cpp": "has only shared experts as wide as a dense layer / key heads"}
    return {}


TARGETS = (
    MoETarget(
        model_type="ernie4_5_moe",
        architecture="Ernie4_5_MoeForCausalLM",
        sources={"ernie4_5": 1, "helium": 1},
        refuses=lambda dense: "its projections have biases" * any(name.endswith("_proj.bias") for name in dense.shapes),
        config_keys=_config_keys,
        runtimes=("vLLM", "SGLang", "llama.cpp"),
        lacks=_lacking,
        shared=LAYER + "mlp.shared_experts.{part}.weight",
        more=lambda _dense, shape: {
            LAYER + "mlp.moe_statics.e_score_correction_bias": Constant((1, shape.experts), 0.0)
        },
        expert_modules=("experts", "shared_experts"),
        # It changes the choice of experts alone, and gets no gradient.
        fixed=("gate.moe_statics.e_score_correction_bias",),
        dense_layers="ends",
        shared_as_experts=True,
        norm_key=False,
    ),
)
