"""How strongly each unit adds to the FFN's output, token by token, reduced to a few directions."""

from collections.abc import Callable, Iterable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from stages.cluster.features import SWEEPS

LEAST_POWER = 1e-10  # of the strongest direction's; below it there is rounding only


def contribution_features(
    hiddens: Callable[[], Iterable[Tensor]], down_DF: Float[Tensor, "D F"], *, dims: int, rng: np.random.Generator
) -> Float[Tensor, "F C"]:
    """Units by |h_j|·‖d_j‖ over tokens, every token's row of unit length, so that loud tokens do not drown the rest.

    The cosine of two units is (up to the reduction) that of their contributions over tokens.

    Args:
        hiddens: gives the unit activations, ``(T, F)`` batch by batch, as often as it is called.
        down_DF: columns d_j.
        dims: directions kept, C = min(dims, F).
        rng: draws the first directions.
    Returns:
        ``(F, C)`` fp32 on the CPU; the zero row for a unit that never contributes.
    """
    norms_F = down_DF.float().norm(dim=0)
    return reduce_columns(
        lambda: (normalize(h_TF.float().abs() * norms_F, dim=1) for h_TF in hiddens()), len(norms_F), dims, rng
    ).cpu()


def reduce_columns(
    batches: Callable[[], Iterable[Tensor]], width: int, dims: int, rng: np.random.Generator
) -> Float[Tensor, "F C"]:
    """Coordinates of the columns of A (all tokens × F) in the span of A's leading left singular vectors.

    A is streamed, once a sweep, and nothing of its length is kept: with Q orthonormal (F, C) and Y = A·Q, the
    coordinates in the span of Y's columns are AᵀY·(YᵀY)^(-1/2).

    Source: randomised subspace iteration, arXiv:0909.4061 algorithm 4.4.
    """
    drawn_FC = torch.from_numpy(rng.standard_normal((width, min(dims, width)), dtype=np.float32))
    for _ in range(SWEEPS):
        pulled_FC, power_CC = _pull(batches(), torch.linalg.qr(drawn_FC).Q)
        drawn_FC = pulled_FC
    values_C, vectors_CC = torch.linalg.eigh(power_CC)
    kept_C = values_C > LEAST_POWER * values_C[-1]
    scale_C = torch.where(kept_C, values_C.clamp_min(torch.finfo(torch.float64).tiny).rsqrt(), 0.0)
    coordinates_FC: Tensor = pulled_FC @ (vectors_CC * scale_C).to(pulled_FC)
    return coordinates_FC


def _pull(batches: Iterable[Tensor], basis_FC: Tensor) -> tuple[Tensor, Tensor]:
    """AᵀA·Q, and QᵀAᵀA·Q in float64."""
    pulled_FC, power_CC = torch.zeros_like(basis_FC), torch.zeros(basis_FC.shape[1], basis_FC.shape[1]).double()
    for batch_TF in batches:
        basis_FC, pulled_FC, power_CC = basis_FC.to(batch_TF), pulled_FC.to(batch_TF), power_CC.to(batch_TF.device)
        seen_TC = batch_TF @ basis_FC
        pulled_FC += batch_TF.T @ seen_TC
        power_CC += seen_TC.double().T @ seen_TC.double()
    return pulled_FC, power_CC
