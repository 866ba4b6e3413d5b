"""config.json of the project's own class, from config.json of the dense model."""

from collections.abc import Mapping
from typing import Any

from models.dense import DENSE_FAMILIES
from models.shape import MoEShape
from models.targets.base import MoETarget
from models.targets.gate_scale import ALIGNMENT, expert_width, gate_scale_of, shared_width
from models.tiny_onn.keys import tiny_onn_keys


def own_config(
    source: Mapping[str, Any], target: MoETarget, shape: MoEShape, dtype: str, pad_to: int = ALIGNMENT
) -> dict[str, Any]:
    """config.json of a `TinyONNForCausalLM`.

    Args:
        source: config.json of the dense checkpoint; it is kept whole, for the decoder is built from it.
        target: tiny_onn.
        shape: E, N, K, S.
        dtype: float32, bfloat16 or float16.
        pad_to: widths are rounded up to a multiple of this.
    """
    gate_scale = gate_scale_of(target, shape)
    scale, normalised = gate_scale.routed_scaling_factor, gate_scale.norm_topk_prob
    assert scale is not None, "the own class carries the scale in its config"
    assert normalised is not None, "and says whether gates are renormalised"
    keys = tiny_onn_keys(
        source,
        experts=shape.experts,
        top_k=shape.top_k,
        expert_width=expert_width(shape, pad_to),
        shared_width=shared_width(target, shape, pad_to),
        routed_scaling_factor=scale,
        norm_topk_prob=normalised,
        scoring="sigmoid",
        dtype=dtype,
        topology=shape.topology,
    )
    tied = {"tie_word_embeddings": keeps_tied(source)}
    return keys | tied | {"dense": _legacy_rope(keys["dense"]) | tied}


def _legacy_rope(dense: dict[str, Any]) -> dict[str, Any]:
    """Phi-3's position encoding as its hub checkpoints spell it, which both generations of transformers read.

    transformers 4 takes no other keys in its scaling, and does not look for the rotated share of a head within it.
    """
    stored = dense.get("rope_parameters")
    if dense["model_type"] != "phi3" or not stored:
        return dense
    rest = {key: value for key, value in dense.items() if key != "rope_parameters"}
    apart = {key: stored[key] for key in _BESIDE_SCALING if key in stored}
    if stored.get("rope_type") != "longrope":
        return rest | apart | {"rope_scaling": None}
    factors = {key: stored[key] for key in ("short_factor", "long_factor")}
    return rest | apart | {"rope_scaling": {"type": "longrope", **factors}}


_BESIDE_SCALING = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")


def keeps_tied(source: Mapping[str, Any]) -> bool:
    """Whether input and output embedding are one tensor, which the own class leaves as it is."""
    defaults = DENSE_FAMILIES[str(source["model_type"])].defaults
    return bool(source.get("tie_word_embeddings", defaults.get("tie_word_embeddings", False)))
