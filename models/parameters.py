"""How many parameters a dense model and its carve have, from config.json alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.dense import DENSE_FAMILIES, keeps_tied
from models.shape import MoEShape
from models.targets.base import ALIGNMENT, MoETarget, expert_width, shared_width


@dataclass(frozen=True)
class ParameterCount:
    """All parameters, and those that a token passes."""

    total: int
    active: int


def count_dense(source: Mapping[str, Any]) -> ParameterCount:
    """Of the dense model; an output embedding that is tied to the input's is no parameter of its own.

    Args:
        source: its config.json.
    """
    ffn = 3 * int(source["hidden_size"]) * int(source["intermediate_size"])
    total = _count_kept(source, tied=keeps_tied(source)) + int(source["num_hidden_layers"]) * ffn
    return ParameterCount(total, total)


def count_carved(
    source: Mapping[str, Any], target: MoETarget, shape: MoEShape, pad_to: int = ALIGNMENT
) -> ParameterCount:
    """Of the checkpoint that `emit_checkpoint` writes: with zero neurons that fill experts up.

    Experts that all layers share are passed, and counted, once in every layer. Biases of the selection are buffers.

    Args:
        source: config.json of the dense checkpoint.
        target: the architecture to write.
        shape: E, N, K, S.
        pad_to: widths are rounded up to a multiple of this.
    """
    hidden, layers = int(source["hidden_size"]), int(source["num_hidden_layers"])
    expert = 3 * hidden * expert_width(shape, pad_to)
    layer = hidden * shape.experts + 3 * hidden * shared_width(target, shape, pad_to)
    if target.shared_router:
        layer += hidden
    others = _count_kept(source, tied=target.own and keeps_tied(source)) + layers * layer
    experts = shape.experts * expert * (1 if shape.pooled else layers)
    return ParameterCount(others + experts, others + shape.top_k * expert * layers)


# Families that normalise all heads' queries, and all keys, at once.
_NORM_OF_ALL_HEADS = frozenset({"olmo2"})


def _count_kept(source: Mapping[str, Any], *, tied: bool) -> int:
    """Embeddings, attention and norms."""
    family = DENSE_FAMILIES[str(source["model_type"])]
    dense = {**family.defaults, **source}
    hidden, heads = int(dense["hidden_size"]), int(dense["num_attention_heads"])
    head_dim = int(dense.get("head_dim") or hidden // heads)
    widths = {"q": heads * head_dim, "k": int(dense.get("num_key_value_heads") or heads) * head_dim, "o": hidden}
    widths["v"] = widths["k"]
    layer = 2 * hidden * (widths["q"] + widths["k"]) + len(family.norms) * hidden
    layer += sum(widths[projection] for projection in family.attention_biases(dense))
    if family.qk_norm:
        layer += widths["q"] + widths["k"] if family.model_type in _NORM_OF_ALL_HEADS else 2 * head_dim
    embeddings = int(dense["vocab_size"]) * hidden * (1 if tied else 2)
    return embeddings + int(dense["num_hidden_layers"]) * layer + hidden
