"""GLM-4-MoE and dots.llm1: shared experts without a gate; dots.llm1 has Qwen3's biases and windows in some layers."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from models.decoder import Decoder
from models.targets.base import LAYER, ConfigInput, MoETarget, copied, rotated_share, several_chosen

if TYPE_CHECKING:
    from torch import Tensor


def _expert_keys(given: ConfigInput) -> dict[str, Any]:
    """Keys of config.json for the experts."""
    return {
        "n_routed_experts": given.shape.experts,
        "moe_intermediate_size": given.width,
        "n_shared_experts": given.shared // given.width,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": len(given.shape.dense_layers),
    }


def _glm4_keys(given: ConfigInput) -> dict[str, Any]:
    ends = {name.split(".self_attn.")[-1] for name in given.decoder.shapes}
    rotated = {"partial_rotary_factor": rotated_share(given.decoder.config)}
    return {
        **_expert_keys(given),
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


def _dots1_keys(given: ConfigInput) -> dict[str, Any]:
    dense, layers = given.dense, range(int(given.dense["num_hidden_layers"]))
    # Qwen3 uses its window only with `use_sliding_window`, dots.llm1 always.
    window = dense.get("sliding_window", 4096) if dense.get("use_sliding_window") else None
    first = int(dense.get("max_window_layers", 28)) if window is not None else len(layers)
    kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in layers]
    if window is not None and dense.get("layer_types"):
        kinds = list(dense["layer_types"])
    return _expert_keys(given) | {
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        # vLLM also multiplies the shared experts by it, so the scale goes into the down projections.
        "routed_scaling_factor": 1.0,
        "attention_bias": bool(dense.get("attention_bias")),
        "sliding_window": window,
        "max_window_layers": dense.get("max_window_layers", 28),
        "layer_types": kinds,
    }


_GLM4_MOE = MoETarget(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    sources={"glm": 1, "seed_oss": 1, "qwen3": 2, "qwen2": 2, "llama": 2, "mistral": 2, "phi3": 2},
    config_keys=_glm4_keys,
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
)
TARGETS = (
    _GLM4_MOE,
    replace(
        _GLM4_MOE,
        model_type="dots1",
        architecture="Dots1ForCausalLM",
        sources={"qwen3": 3},
        config_keys=_dots1_keys,
        runtime_note="vLLM and llama.cpp give this architecture no sliding window and no bias on o_proj: serve such a "
        "source by transformers.",
        needs_head=("vLLM", "SGLang", "llama.cpp"),
        llama_cpp_equal_heads=True,
        factor_key=False,
        output_bias=True,
        partial_rotation=False,
        layer_windows=True,
    ),
)
