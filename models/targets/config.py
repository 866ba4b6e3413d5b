"""config.json of the MoE, from config.json of the dense model.

Keys are written for transformers 4 (rope_theta, rope_scaling, torch_dtype) and 5 (rope_parameters, dtype): a generation
that misses its own falls back on the architecture's defaults without a word.
"""

from collections.abc import Mapping
from typing import Any

from models.dense import DENSE_FAMILIES
from models.shape import MoEShape
from models.targets.base import MoETarget
from models.targets.gate_scale import ALIGNMENT, expert_width, gate_scale_of, shared_width

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


def emit_config(
    source: Mapping[str, Any], target: MoETarget, shape: MoEShape, dtype: str, pad_to: int = ALIGNMENT
) -> dict[str, Any]:
    """The MoE's config.json.

    Args:
        source: config.json of the dense checkpoint, of either transformers generation.
        target: the architecture to write.
        shape: E, N, K, S.
        dtype: float32, bfloat16 or float16.
        pad_to: widths are rounded up to a multiple of this.
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
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "dtype": dtype,
        **_rope(dense),
    }
    if not target.selection_bias:
        # Balanced by a bias, an architecture has no such loss, and trainers would ask for it where the key stands. TRL
        # adds the loss wherever its weight is not 0: even load is not what the routers of a carve were fitted to.
        config |= {"output_router_logits": False, "router_aux_loss_coef": 0.0}
    if "transformers_version" in dense:
        # Tokenizer fixes of transformers depend on who wrote the checkpoint.
        config["transformers_version"] = dense["transformers_version"]
    return config | _particular(dense, target, shape, pad_to)


def source_dtype(source: Mapping[str, Any]) -> str | None:
    """Number format that config.json names, if any."""
    named = source.get("dtype") or source.get("torch_dtype")
    return None if named is None else str(named).removeprefix("torch.")


def _particular(dense: Mapping[str, Any], target: MoETarget, shape: MoEShape, pad_to: int) -> dict[str, Any]:
    gate_scale = gate_scale_of(target, shape)
    width, shared = expert_width(shape, pad_to), shared_width(target, shape, pad_to)
    match target.model_type:
        case "mixtral":
            return {
                "intermediate_size": width,
                "num_local_experts": shape.experts,
                "sliding_window": dense.get("sliding_window") if dense["model_type"] in {"mistral", "phi3"} else None,
            }
        case "qwen3_moe":
            return _qwen(shape, width) | {
                "attention_bias": bool(dense.get("attention_bias")),
                "norm_topk_prob": gate_scale.norm_topk_prob,
            }
        case "qwen2_moe":
            return _qwen(shape, width) | {
                "qkv_bias": dense["model_type"] == "qwen2",
                "shared_expert_intermediate_size": shared,
                "norm_topk_prob": gate_scale.norm_topk_prob,
            }
        case "glm4_moe":
            return _glm(dense, shape, width, shared) | {
                "routed_scaling_factor": gate_scale.routed_scaling_factor,
                "norm_topk_prob": gate_scale.norm_topk_prob,
            }
        case "flex_olmo":
            return {
                "intermediate_size": width,
                "num_experts": shape.experts,
                "attention_bias": bool(dense.get("attention_bias")),
                "norm_topk_prob": gate_scale.norm_topk_prob,
            }
        case "granitemoe" | "granitemoeshared":
            return _granite(dense, shape, width, shared)
    raise AssertionError(f"no config for {target.model_type}")


def _qwen(shape: MoEShape, width: int) -> dict[str, Any]:
    return {
        "num_experts": shape.experts,
        "moe_intermediate_size": width,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
        "sliding_window": None,
    }


def _granite(dense: Mapping[str, Any], shape: MoEShape, width: int, shared: int) -> dict[str, Any]:
    multipliers = ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier")
    return {
        "intermediate_size": width,
        "num_local_experts": shape.experts,
        # granitemoe has none and ignores it.
        "shared_intermediate_size": shared,
        "attention_bias": bool(dense.get("attention_bias")),
        **{name: dense.get(name, 1.0) for name in multipliers},
    }


def _glm(dense: Mapping[str, Any], shape: MoEShape, width: int, shared: int) -> dict[str, Any]:
    return {
        "n_routed_experts": shape.experts,
        "moe_intermediate_size": width,
        "n_shared_experts": shared // width,
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
    # Sources that rotate part of each head are refused, so it is 1.
    stored.pop("partial_rotary_factor", None)
    kind = stored.pop("type", "default")
    scaling = {"rope_type": _LONG.get(kind, kind), **stored}
    if scaling["rope_type"] != "longrope":
        return _both(theta, scaling)
    original = stored.get("original_max_position_embeddings") or dense["original_max_position_embeddings"]
    # Phi3's own class knows the factor from the two lengths; the others warn where it is not said.
    scaling = {"factor": dense["max_position_embeddings"] / original, **scaling}
    scaling["original_max_position_embeddings"] = original
    # transformers 4 reads it beside the scaling, transformers 5 within.
    return _both(theta, scaling) | {"original_max_position_embeddings": original}


# What early Phi-3 checkpoints call it.
_LONG = {"su": "longrope"}


def _both(theta: float, scaling: dict[str, Any]) -> dict[str, Any]:
    return {
        "rope_theta": theta,
        "rope_scaling": None if scaling["rope_type"] == "default" else scaling,
        "rope_parameters": {"rope_theta": theta, **scaling},
    }
