"""Tiny random Mixtures-of-Experts of every architecture: model type → its configuration keys."""

from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "num_hidden_layers": 2, "hidden_size": 24, "intermediate_size": 40, "vocab_size": 61, "num_attention_heads": 4,
    "num_key_value_heads": 2, "moe_intermediate_size": 8, "num_experts_per_tok": 2, "head_dim": 6,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
MOES = {
    "qwen3_moe": {"num_experts": 5},
    "qwen2_moe": {"num_experts": 5, "shared_expert_intermediate_size": 16},
    "mixtral": {"num_local_experts": 5},
    "glm4_moe": {"n_routed_experts": 5, "n_shared_experts": 2, "first_k_dense_replace": 0, "n_group": 1,
                 "topk_group": 1},
    "flex_olmo": {"num_experts": 5},
    "granitemoe": {"num_local_experts": 5},
    "granitemoeshared": {"num_local_experts": 5, "shared_intermediate_size": 16},
}  # fmt: skip

# The router is a layer within a module, takes a bias, or some of the parameters never learn.
UNUSUAL_MOES = {
    "gemma4_text": {"num_experts": 5, "top_k_experts": 2, "enable_moe_block": True, "hidden_size_per_layer_input": 0,
                    "layer_types": ["sliding_attention", "full_attention"]},
    "lfm2_moe": {"num_experts": 5, "num_dense_layers": 0, "layer_types": ["conv", "full_attention"]},
    "ernie4_5_moe": {"moe_num_experts": 5, "moe_k": 2, "moe_num_shared_experts": 2, "moe_layer_start_index": 0},
    "hunyuan_v1_moe": {"num_experts": 5, "num_experts_per_tok": [2, 2], "intermediate_size": 8},
}  # fmt: skip


def make_moe(model_type, **more):
    """Random weights: 2 layers of 5 experts with 8 neurons each, top-2, hidden size 24."""
    keys = SIZES | {**MOES, **UNUSUAL_MOES}[model_type] | more
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **keys))
