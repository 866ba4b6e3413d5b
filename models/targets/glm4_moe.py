"""GLM-4-MoE: shared experts without a gate."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from models.decoder import Decoder
from models.targets.base import LAYER, ConfigInput, MoETarget, copied, rotated_share, several_chosen

if TYPE_CHECKING:
    from torch import Tensor


def _config_keys(given: ConfigInput) -> dict[str, Any]:
    ends = {name.split(".self_attn.")[-1] for name in given.decoder.shapes}
    rotated = {"partial_rotary_factor": rotated_share(given.decoder.config)}
    return {
        "n_routed_experts": given.shape.experts,
        "moe_intermediate_size": given.width,
        "n_shared_experts": given.shared // given.width,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": len(given.shape.dense_layers),
        "num_nextn_predict_layers": 0,
        "attention_bias": "q_proj.bias" in ends,
        "use_qk_norm": "q_norm.weight" in ends,
        # The architecture rotates half of each head if this key is missing, so it is at both levels.
        **rotated,
        "rope_parameters": given.dense["rope_parameters"] | rotated,
    }


def _in_halves(dense: Decoder, name: str, tensor: "Tensor") -> Mapping[str, "Tensor"]:
    """GLM rotates neighbours of a head, (0, 1), (2, 3) ...; the Mixture-of-Experts a half with the other half."""
    if dense.model_type == "glm" and re.search(r"self_attn\.[qk]_proj\.", name):
        width = int(dense.config["head_dim"])
        turned = int(width * rotated_share(dense.config))
        order = [*range(0, turned, 2), *range(1, turned, 2), *range(turned, width)]
        tensor = tensor.reshape(-1, width, *tensor.shape[1:])[:, order].reshape(tensor.shape)
    return copied(dense, name, tensor)


TARGETS = (
    MoETarget(
        model_type="glm4_moe",
        architecture="Glm4MoeForCausalLM",
        sources={"glm": 1, "seed_oss": 1, "qwen3": 2, "qwen2": 2, "llama": 2, "exaone": 2, "mistral": 2, "phi3": 2},
        config_keys=_config_keys,
        copies=_in_halves,
        runtimes=("vLLM", "SGLang", "llama.cpp"),
        needs_head=("vLLM", "SGLang"),
        runtime_note="llama.cpp's own converter wants GLM's special tokens and stops at [gMASK]; "
        "`python -m pipeline gguf` runs it with the vocabulary as it is.",
        shared=LAYER + "mlp.shared_experts.{part}.weight",
        expert_modules=("experts", "shared_experts"),
        dense_layers="first",
        always_has_shared=True,
        shared_as_experts=True,  # config.json counts shared experts, each as wide as a routed one
        selection_bias=LAYER + "mlp.gate.e_score_correction_bias",
        selection_bias_scale=0.25,  # it chooses by σ(z) + bias, and σ(z) ≈ ½ + z/4 for small logits z
        scoring="sigmoid",
        normalised=several_chosen,
        factor_key=True,
        least_experts=2,
        partial_rotation=True,
    ),
)
