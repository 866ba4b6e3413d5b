"""Sums over one layer's tokens: how strongly and how often each unit fires, and its Taylor score."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

# Tokens whose activations are worked on at once.
_CHUNK = 4096


@dataclass(frozen=True)
class UnitRule:
    """How units are measured."""

    active_share: float  # a unit is active in the token's top share of |h|, ties included, zeros never ...
    active_threshold: float | None  # ... or, when set, where |h| exceeds this
    norm_product: str = "auto"  # gram, direct, or the cheaper one

    def active_count(self, width: int) -> int:
        """How many of `width` units the share makes."""
        return max(1, round(self.active_share * width))


def sum_tokens(
    h_MF: Float[Tensor, "M F"], grad_MF: Float[Tensor, "M F"] | None, rows_T: Int[Tensor, "T"], rule: UnitRule
) -> tuple[Float[Tensor, "5 F"], Float[Tensor, "T"]]:
    """Σ|h|, Σh², max|h|, the number of tokens for which a unit is active, and Σ|h·∂L/∂h|.

    Args:
        h_MF: activations, padding included.
        grad_MF: their gradients; None gives zeros in the last row.
        rows_T: which of the M rows count.
        rule: which units are active.

    Returns:
        Float64 sums on the same device, and for every token the |h| from which on a unit is active.

    Numerics: fp32 within 4096 tokens, float64 beyond.
    """
    sums_5F = torch.zeros(5, h_MF.shape[1], dtype=torch.float64, device=h_MF.device)
    limits = []
    for rows in torch.split(rows_T, _CHUNK):
        magnitude_TF = h_MF[rows].float().abs()
        limit_T1 = activity_limits(magnitude_TF, rule)
        sums_5F[0] += magnitude_TF.sum(0)
        sums_5F[1] += magnitude_TF.square().sum(0)
        sums_5F[2] = torch.maximum(sums_5F[2], magnitude_TF.amax(0))
        sums_5F[3] += (magnitude_TF >= limit_T1).sum(0)
        if grad_MF is not None:
            sums_5F[4] += magnitude_TF.mul_(grad_MF[rows]).abs_().sum(0)
        limits.append(limit_T1[:, 0])
    return sums_5F, torch.cat(limits)


def activity_limits(magnitude_TF: Float[Tensor, "T F"], rule: UnitRule) -> Float[Tensor, "T 1"]:
    """The |h| from which on a unit is active, for every token."""
    smallest = torch.finfo(torch.float32).tiny
    if rule.active_threshold is not None:
        limit = torch.full((len(magnitude_TF), 1), rule.active_threshold, device=magnitude_TF.device)
        return limit.nextafter(torch.full_like(limit, torch.inf)).clamp_min(smallest)
    count = rule.active_count(magnitude_TF.shape[1])
    return magnitude_TF.topk(count, dim=1, sorted=False).values.amin(1, keepdim=True).clamp_min(smallest)


def pack_bits(active_RF: Bool[Tensor, "R F"]) -> UInt8[Tensor, "R f"]:
    """Rows of truth values as bits, (R, ceil(F/8)) uint8, most significant first as numpy.packbits does."""
    padded = torch.nn.functional.pad(active_RF.to(torch.uint8), (0, -active_RF.shape[1] % 8))
    places = torch.arange(7, -1, -1, dtype=torch.uint8, device=active_RF.device)
    packed: Tensor = (padded.view(len(padded), padded.shape[1] // 8, 8) << places).sum(-1, dtype=torch.uint8)
    return packed
