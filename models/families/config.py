"""config.json of the MoE, from config.json of the dense model.

Keys are written for transformers 4 (rope_theta, rope_scaling, torch_dtype) and 5 (rope_parameters, dtype): a generation
that misses its own falls back on the architecture's defaults without a word.
"""

from collections.abc import Mapping
from typing import Any

from models.families.dense import DENSE_FAMILIES
from models.families.fold import gate_fold
from models.families.moe import MoETarget
from models.families.width import expert_width, shared_width
from models.shape import Shape

_DEFAULT_THETA = 10000.0

_CARRIED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "hidden_act", "rms_norm_eps",
    "max_position_embeddings",
)  # fmt: skip
_CARRIED_OR_DEFAULT = {
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
    "use_cache": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def emit_config(source: Mapping[str, Any], target: MoETarget, shape: Shape, dtype: str) -> dict[str, Any]:
    """The MoE's config.json.

    Args:
        source: config.json of the dense checkpoint, of either transformers generation.
        target: the architecture to write.
        shape: E, N, K, S.
        dtype: float32, bfloat16 or float16.
    """
    family = DENSE_FAMILIES[str(source["model_type"])]
    dense = {"hidden_act": "silu", **family.defaults, **source}
    heads = dense["num_attention_heads"]
    config = {
        "architectures": [target.architecture],
        "model_type": target.model_type,
        **{key: dense[key] for key in _CARRIED},
        **{key: dense.get(key, default) for key, default in _CARRIED_OR_DEFAULT.items()},
        "num_key_value_heads": dense.get("num_key_value_heads") or heads,
        "head_dim": dense.get("head_dim") or dense["hidden_size"] // heads,
        "intermediate_size": dense["intermediate_size"],
        "num_experts_per_tok": shape.top_k,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "dtype": dtype,
        **_rope(dense),
    }
    if "transformers_version" in dense:
        # Tokenizer fixes of transformers depend on who wrote the checkpoint.
        config["transformers_version"] = dense["transformers_version"]
    return config | _particular(dense, target, shape)


def source_dtype(source: Mapping[str, Any]) -> str | None:
    """Number format that config.json names, if any."""
    named = source.get("dtype") or source.get("torch_dtype")
    return None if named is None else str(named).removeprefix("torch.")


def _particular(dense: Mapping[str, Any], target: MoETarget, shape: Shape) -> dict[str, Any]:
    fold = gate_fold(target, shape)
    match target.model_type:
        case "mixtral":
            return {
                "intermediate_size": expert_width(shape),
                "num_local_experts": shape.experts,
                "sliding_window": dense.get("sliding_window") if dense["model_type"] == "mistral" else None,
            }
        case "qwen3_moe":
            return _qwen(shape) | {
                "attention_bias": bool(dense.get("attention_bias")),
                "norm_topk_prob": fold.norm_topk_prob,
            }
        case "qwen2_moe":
            return _qwen(shape) | {
                "qkv_bias": dense["model_type"] == "qwen2",
                "shared_expert_intermediate_size": shared_width(target, shape),
                "norm_topk_prob": fold.norm_topk_prob,
            }
        case "glm4_moe":
            return _glm(dense, target, shape)
    raise AssertionError(f"no config for {target.model_type}")


def _qwen(shape: Shape) -> dict[str, Any]:
    return {
        "num_experts": shape.experts,
        "moe_intermediate_size": expert_width(shape),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
        "sliding_window": None,
    }


def _glm(dense: Mapping[str, Any], target: MoETarget, shape: Shape) -> dict[str, Any]:
    fold = gate_fold(target, shape)
    return {
        "n_routed_experts": shape.experts,
        "moe_intermediate_size": expert_width(shape),
        "n_shared_experts": shared_width(target, shape) // expert_width(shape),
        "routed_scaling_factor": fold.routed_scaling_factor,
        "norm_topk_prob": fold.norm_topk_prob,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "num_nextn_predict_layers": 0,
        "attention_bias": dense["model_type"] == "qwen2",
        "use_qk_norm": dense["model_type"] == "qwen3",
        # The architecture rotates half of each head unless told otherwise, at both levels.
        "partial_rotary_factor": 1.0,
        "rope_parameters": _rope(dense)["rope_parameters"] | {"partial_rotary_factor": 1.0},
    }


def _rope(dense: Mapping[str, Any]) -> dict[str, Any]:
    """Position encoding in the spelling of both generations."""
    stored = dict(dense.get("rope_parameters") or dense.get("rope_scaling") or {})
    theta = stored.pop("rope_theta", None) or dense.get("rope_theta") or _DEFAULT_THETA
    legacy_type = stored.pop("type", "default")
    scaling = {"rope_type": legacy_type, **stored}
    return {
        "rope_theta": theta,
        "rope_scaling": None if scaling["rope_type"] == "default" else scaling,
        "rope_parameters": {"rope_theta": theta, **scaling},
    }
