"""dots.llm1: Qwen3's attention with its biases and with windows in some layers, and shared experts without a gate."""

from typing import Any

from models.targets.base import LAYER, ConfigInput, MoETarget, several_chosen


def _config_keys(given: ConfigInput) -> dict[str, Any]:
    dense, layers = given.dense, range(int(given.dense["num_hidden_layers"]))
    # Qwen3 uses its window only with `use_sliding_window`, dots.llm1 always.
    window = dense.get("sliding_window", 4096) if dense.get("use_sliding_window") else None
    first = int(dense.get("max_window_layers", 28)) if window is not None else len(layers)
    kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in layers]
    if window is not None and dense.get("layer_types"):
        kinds = list(dense["layer_types"])
    return {
        "n_routed_experts": given.shape.experts,
        "moe_intermediate_size": given.width,
        "n_shared_experts": given.shared // given.width,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": len(given.shape.dense_layers),
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        # vLLM also multiplies the shared experts by it, so the scale goes into the down projections.
        "routed_scaling_factor": 1.0,
        "attention_bias": bool(dense.get("attention_bias")),
        "sliding_window": window,
        "max_window_layers": dense.get("max_window_layers", 28),
        "layer_types": kinds,
    }


TARGETS = (
    MoETarget(
        model_type="dots1",
        architecture="Dots1ForCausalLM",
        sources={"qwen3": 3},
        config_keys=_config_keys,
        runtimes=("vLLM", "SGLang", "llama.cpp"),
        runtime_note="vLLM gives this architecture no sliding window and no bias on o_proj: serve such a source by "
        "transformers.",
        llama_cpp_equal_heads=True,
        shared=LAYER + "mlp.shared_experts.{part}.weight",
        dense_layers="first",
        always_has_shared=True,
        shared_as_experts=True,
        selection_bias=LAYER + "mlp.gate.e_score_correction_bias",
        selection_bias_scale=0.25,  # it chooses by σ(z) + bias, and σ(z) ≈ ½ + z/4 for small logits z
        scoring="sigmoid",
        normalised=several_chosen,
        least_experts=2,
        output_bias=True,
        layer_windows=True,
    ),
)
