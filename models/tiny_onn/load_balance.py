"""The loss that keeps experts evenly loaded.

This file goes into the checkpoint's folder: it needs nothing but torch.
"""

import torch
from torch import Tensor

from .sparse_ffn import score_logits


def measure_imbalance(
    logits: list[Tensor], chosen: list[Tensor], *, scoring: str, pooled: bool, attention_mask: Tensor | None = None
) -> Tensor:
    """Load balancing loss: E · Σ_e (share of tokens that chose e) · (mean probability of e).

    Args:
        logits: ``(T, E)`` by layer.
        chosen: ``(T, K)`` by layer.
        scoring: softmax or sigmoid.
        pooled: all layers share the experts, so that the load is that of all layers together; else each layer is to
            be balanced by itself, and the loss is the mean over layers.
        attention_mask: ``(B, S)``, B·S = T; tokens where it is 0 count nothing. Other masks are ignored.
    Returns:
        A scalar: K when all is even, up to E when one set of K experts gets every token.
    Source: Switch Transformers, arXiv:2101.03961 eq. 4; differs: top K, and by layer.
    """
    layers_LTE = torch.stack([layer.to(logits[0].device) for layer in logits])
    shares_LTE = score_logits(layers_LTE, scoring)
    probability_LTE = shares_LTE / shares_LTE.sum(-1, keepdim=True)
    chosen_LTK = torch.stack([layer.to(layers_LTE.device) for layer in chosen])
    load_LTE = torch.zeros_like(probability_LTE).scatter_(-1, chosen_LTK, 1.0)
    weight_T1 = _token_weights(attention_mask, probability_LTE)
    axes = (0, 1) if pooled else 1
    tokens = weight_T1.sum() * (len(layers_LTE) if pooled else 1)
    load, probability = ((part_LTE * weight_T1).sum(axes) / tokens for part_LTE in (load_LTE, probability_LTE))
    return layers_LTE.shape[-1] * (load * probability).sum(-1).mean()


def _token_weights(attention_mask: Tensor | None, like_LTE: Tensor) -> Tensor:
    count = like_LTE.shape[1]
    # While generating with a cache, the mask covers tokens that are not in this pass.
    if attention_mask is None or attention_mask.ndim != 2 or attention_mask.numel() != count:
        return like_LTE.new_ones(count, 1)
    return attention_mask.reshape(-1, 1).to(like_LTE)
