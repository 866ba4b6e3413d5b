"""Rank an FFN's neurons by the error of removing them, with the down columns of the others refitted."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from models.ffn import DenseFFN
from stages.calibration.normal_equations import ridge_cholesky
from stages.calibration.share import Share

PENALTY = 1e-2  # of the refit, relative to the mean diagonal of the second moment
SHARE = 32  # each step removes 1/32 of the remaining neurons
PACKED = 0.8  # rows are compacted when fewer than this share belong to remaining neurons


def rank_by_alignment(ffn: DenseFFN, inputs: Sequence[Tensor], keep: int) -> Float[Tensor, "F"]:
    """Rank neurons by the error of the aligned output without them; higher is better to keep."""
    if keep >= ffn.width:
        return torch.ones(ffn.width)
    gram_FF, workers = ffn.down_DF.new_zeros(ffn.width, ffn.width), Share.of(inputs).workers
    for hidden_TF in map(ffn.hidden, inputs):
        gram_FF.addmm_(hidden_TF.T, hidden_TF)
    workers.reduce_(gram_FF)
    return workers.lead(lambda: rank_by_elimination(gram_FF, ffn.down_DF, keep))


def rank_by_elimination(gram_FF: Float[Tensor, "F F"], down_DF: Float[Tensor, "D F"], keep: int) -> Float[Tensor, "F"]:
    """Backward elimination: repeatedly drop the neurons of least loss, with the others' columns refitted.

    Without neuron j the error Σ_t‖Σ_i h_i·d_i − Σ_{i≠j} h_i·w_i‖² rises by ‖w_j‖² / [G⁻¹]_jj at the best columns w,
    where G is the activations' second moment, whose memory is reused. It stops at `keep` neurons, at least 1.

    Returns:
        ``(F,)`` ranks: 0 for the neuron dropped first; the kept neurons have the highest ranks, ordered by loss.
    Numerics: inverse in fp64, downdates in fp32; the ridge keeps them stable.
    Source: the optimal brain surgeon (Hassibi, Stork 1993) for whole neurons, as in ZipLM, arXiv:2302.04089.
    """
    inverse_UU, columns_UD = _invert(gram_FF), down_DF.T.clone()
    left_U = torch.arange(len(gram_FF), device=gram_FF.device)
    alive_U = torch.ones_like(left_U, dtype=torch.bool)
    gone, alive = [], len(left_U)
    while alive > max(1, keep):
        count = min(max(1, alive // SHARE), alive - max(1, keep))
        losses_U = _losses(columns_UD, inverse_UU).masked_fill_(~alive_U, torch.inf)
        out_u = losses_U.topk(count, largest=False).indices
        gone.append(left_U[out_u])
        _drop(inverse_UU, columns_UD, out_u)
        alive_U[out_u] = False
        alive -= count
        if alive < PACKED * len(left_U):
            stay = alive_U.nonzero()[:, 0]
            inverse_UU, columns_UD = inverse_UU[stay[:, None], stay], columns_UD[stay]
            left_U, alive_U = left_U[stay], alive_U[stay]
    order = _losses(columns_UD, inverse_UU).masked_fill_(~alive_U, torch.inf).argsort()[:alive]
    order_F = torch.cat([*gone, left_U[order]])
    ranks_F = torch.empty(len(order_F))
    ranks_F[order_F.cpu()] = torch.arange(len(order_F), dtype=torch.float32)
    return ranks_F


def _invert(gram_FF: Tensor) -> Tensor:
    """Replace G by the inverse of G with the ridge; G and one fp64 matrix are in memory at a time."""
    inverse_FF = ridge_cholesky(gram_FF, PENALTY)
    torch.cholesky_inverse(inverse_FF, out=inverse_FF)
    return gram_FF.copy_(inverse_FF)


def _losses(columns_UD: Tensor, inverse_UU: Tensor) -> Tensor:
    losses_U: Tensor = columns_UD.square().sum(1) / inverse_UU.diagonal().clamp_min(1e-30)
    return losses_U


def _drop(inverse_UU: Tensor, columns_UD: Tensor, out_u: Tensor) -> None:
    """Refit inverse and columns in place for the neurons that stay; entries of dropped neurons become meaningless."""
    across_uU = inverse_UU[out_u]
    joint = torch.cat([across_uU, columns_UD[out_u]], 1)
    solved = torch.linalg.solve(across_uU[:, out_u].double(), joint.double()).float()
    inverse_UU.addmm_(across_uU.T, solved[:, : len(inverse_UU)], alpha=-1)
    columns_UD.addmm_(across_uU.T, solved[:, len(inverse_UU) :], alpha=-1)
