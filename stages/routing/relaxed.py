"""The choice of K experts, made soft enough to have a gradient."""

import torch
from jaxtyping import Float
from torch import Tensor


def relaxed_mask(logits_TE: Float[Tensor, "T E"], top_k: int, temperature: float) -> Float[Tensor, "T E"]:
    """σ((z − θ) / temperature), θ halfway between the K-th and the next logit; the hard choice at temperature 0.

    All ones where every expert is chosen.
    """
    if top_k == logits_TE.shape[1]:
        return torch.ones_like(logits_TE)
    top_TK = logits_TE.topk(top_k + 1, dim=1).values
    threshold_T = (top_TK[:, -2] + top_TK[:, -1]) / 2
    soft_TE: Tensor = torch.sigmoid((logits_TE - threshold_T[:, None]) / temperature)
    return soft_TE


def load_variance(mask_TE: Float[Tensor, "T E"]) -> Float[Tensor, ""]:
    """Variance over experts of the load, in units of an even share; 0 when all serve alike."""
    load_E = mask_TE.mean(0)
    variance: Tensor = (load_E / load_E.mean() - 1).square().mean()
    return variance
