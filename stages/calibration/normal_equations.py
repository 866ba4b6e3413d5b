"""Streamed ridge regression: only second moments are kept, never all the tokens."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from models.errors import NumericsError
from models.expert_loop import Block, sum_blocks

LARGE = 2048  # inputs
SOUND = 1e5  # condition number


class NormalEquations:
    """Moments of min_W Σ_t ‖y_t − W a_t‖² + λ‖W‖², with λ = penalty × the mean diagonal of Σ a aᵀ.

    Products run in fp32, sums are kept in fp64.
    """

    def __init__(self, inputs: int, outputs: int, *, device: torch.device | None = None) -> None:
        """Start from nothing: A inputs, Y outputs."""
        self.gram_AA = torch.zeros(inputs, inputs, dtype=torch.float64, device=device)
        self.cross_AY = torch.zeros(inputs, outputs, dtype=torch.float64, device=device)
        self.rows = 0

    def add(self, a_TA: Float[Tensor, "T A"], y_TY: Float[Tensor, "T Y"]) -> None:
        """Add one batch of rows."""
        self.gram_AA += (a_TA.T @ a_TA).to(self.gram_AA)
        self.cross_AY += (a_TA.T @ y_TY).to(self.cross_AY)
        self.rows += len(a_TA)

    def add_blocks(self, blocks: Sequence[Block], y_TY: Float[Tensor, "T Y"]) -> None:
        """Add one batch of rows that are zero outside blocks of them; blocks that meet are summed.

        Σ aᵀa goes block by block over the block's own rows, so that the arithmetic falls with the share of what is not
        zero.
        """
        a_TA = sum_blocks(blocks, len(y_TY), len(self.gram_AA))
        for tokens_t, units_N, hidden_tN in blocks:
            everyone = len(tokens_t) == len(y_TY)
            a_tA, y_tY = (a_TA, y_TY) if everyone else (a_TA[tokens_t], y_TY[tokens_t])
            self.gram_AA[units_N] += (hidden_tN.T @ a_tA).to(self.gram_AA)
            self.cross_AY[units_N] += (hidden_tN.T @ y_tY).to(self.cross_AY)
        self.rows += len(y_TY)

    def solve(self, penalty: float) -> Float[Tensor, "Y A"]:
        """W of the ridge regression, fp32.

        Raises:
            NumericsError: the moments are not finite, or not positive definite even with the penalty.
        """
        if not (self.gram_AA.isfinite().all() and self.cross_AY.isfinite().all()):
            raise NumericsError(
                "the calibration moments are not finite", do="calibrate in float32: model.dtype=float32"
            )
        scale = self.gram_AA.diagonal().mean()
        if scale == 0:
            # Inputs that are all zero (a pruned layer) ask for nothing.
            return torch.zeros_like(self.cross_AY.T).float()
        # Inputs that are always zero (units of no active expert) keep a zero weight, and cost nothing.
        used_a = self.gram_AA.diagonal().nonzero()[:, 0]
        dtype = solving_dtype(len(used_a), penalty)
        system_aa = self.gram_AA[used_a][:, used_a]
        system_aa.diagonal().add_(penalty * scale)
        factor_aa, failed = torch.linalg.cholesky_ex(system_aa.to(dtype))
        if failed:
            raise NumericsError(
                f"{self.rows} calibration tokens do not determine {len(system_aa)} coefficients",
                do="more tokens (data.tokens=) or a larger penalty",
            )
        weight_AY = torch.zeros_like(self.cross_AY, dtype=torch.float32)
        weight_AY[used_a] = torch.cholesky_solve(self.cross_AY[used_a].to(dtype), factor_aa).float()
        return weight_AY.T


def solving_dtype(inputs: int, penalty: float) -> torch.dtype:
    """fp64; fp32 for systems that are large and, by their penalty, sound: at half the time.

    The largest eigenvalue is at most the trace, so the condition number is at most inputs / penalty + 1; at 10⁵ of it
    fp32 keeps two digits of what is itself an estimate.
    """
    return torch.float32 if inputs >= LARGE and inputs / penalty <= SOUND else torch.float64
