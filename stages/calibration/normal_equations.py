"""Streamed ridge regression: only second moments are kept, never all the tokens."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from instruments.errors import NumericsError
from models.experts import Block, sum_blocks

LARGE = 2048  # inputs
SOUND = 1e5  # condition number
PANEL = 512  # rows of the upper triangle that are added at a time


class NormalEquations:
    """Moments of min_W Σ_t ‖y_t − W a_t‖² + λ‖W‖², with λ = penalty × the mean diagonal of Σ a aᵀ.

    Products run in fp32, sums are kept in fp64. Of `gram_AA` the upper triangle counts, in the order of `order_A`.
    """

    def __init__(self, inputs: int, outputs: int, *, device: torch.device | None = None) -> None:
        """Start from nothing: A inputs, Y outputs."""
        self.gram_AA = torch.zeros(inputs, inputs, dtype=torch.float64, device=device)
        self.cross_AY = torch.zeros(inputs, outputs, dtype=torch.float64, device=device)
        self.order_A = torch.arange(inputs, device=device)  # the input that each row of the moments is of
        self.rows = 0

    def add(self, a_TA: Float[Tensor, "T A"], y_TY: Float[Tensor, "T Y"]) -> None:
        """Add one batch of rows."""
        self.gram_AA += (a_TA.T @ a_TA).to(self.gram_AA)
        self.cross_AY += (a_TA.T @ y_TY).to(self.cross_AY)
        self.rows += len(a_TA)

    def add_blocks(self, blocks: Sequence[Block], y_TY: Float[Tensor, "T Y"]) -> None:
        """Add one batch of rows that are zero outside blocks of them, blocks of the same neurons every time.

        Where blocks are disjoint, arithmetic falls with the share of what is not zero.
        """
        neurons_P = torch.cat([block.neurons_N for block in blocks])
        if bool((torch.bincount(neurons_P) > 1).any()):
            self._add_overlapping(blocks, y_TY)
        else:
            self._add_disjoint(blocks, neurons_P, y_TY)
        self.rows += len(y_TY)

    def _add_disjoint(self, blocks: Sequence[Block], neurons_P: Int[Tensor, "P"], y_TY: Float[Tensor, "T Y"]) -> None:
        """Each block meets itself and those after it, on its own rows: half of the products, in one piece each."""
        if not self.rows:
            others = torch.isin(self.order_A, neurons_P, invert=True)
            self.order_A = torch.cat([neurons_P, self.order_A[others]])
        assert torch.equal(self.order_A[: len(neurons_P)], neurons_P), "blocks of other neurons than before"
        ends = torch.tensor([len(block.neurons_N) for block in blocks]).cumsum(0).tolist()
        a_TP = y_TY.new_zeros(len(y_TY), len(neurons_P))
        for (tokens_t, neurons_N, hidden_tN), end in zip(blocks, ends, strict=True):
            a_TP[:, end - len(neurons_N) : end].index_copy_(0, tokens_t, hidden_tN)
        for (tokens_t, neurons_N, hidden_tN), end in zip(blocks, ends, strict=True):
            start = end - len(neurons_N)
            later_tP = _rows(a_TP[:, start:], tokens_t)
            self.gram_AA[start:end, start : len(neurons_P)] += (hidden_tN.T @ later_tP).to(self.gram_AA)
            self.cross_AY[start:end] += (hidden_tN.T @ _rows(y_TY, tokens_t)).to(self.cross_AY)

    def _add_overlapping(self, blocks: Sequence[Block], y_TY: Float[Tensor, "T Y"]) -> None:
        """Blocks that share neurons are summed; what is zero is multiplied too: few pieces are worth it."""
        a_TA = sum_blocks(blocks, len(y_TY), len(self.gram_AA))
        for start in range(0, len(self.gram_AA), PANEL):
            rows = slice(start, start + PANEL)
            self.gram_AA[rows, start:] += (a_TA[:, rows].T @ a_TA[:, start:]).to(self.gram_AA)
        self.cross_AY += (a_TA.T @ y_TY).to(self.cross_AY)

    def solve(self, penalty: float) -> Float[Tensor, "Y A"]:
        """W of the ridge regression, fp32.

        Raises:
            NumericsError: the moments are not finite, or not positive definite even with the penalty.
        """
        # One value that is not finite makes the sum so, and a sum needs no tensor as large as the moments.
        if not (self.gram_AA.sum().isfinite() and self.cross_AY.sum().isfinite()):
            raise NumericsError(
                "the calibration moments are not finite", do="calibrate in float32: model.dtype=float32"
            )
        scale = self.gram_AA.diagonal().mean()
        if scale == 0:
            # Inputs that are all zero (a pruned layer) ask for nothing.
            return torch.zeros_like(self.cross_AY.T).float()
        # Inputs that are always zero (neurons of no active expert) keep a zero weight, and cost nothing.
        used_a = self.gram_AA.diagonal().nonzero()[:, 0]
        dtype = solving_dtype(len(used_a), penalty)
        system_aa = self._system(used_a, dtype)
        system_aa.diagonal().copy_(self.gram_AA.diagonal()[used_a] + penalty * scale)
        factor_aa, failed = torch.linalg.cholesky_ex(system_aa, upper=True)
        if failed:
            raise NumericsError(
                f"{self.rows} calibration tokens do not determine {len(system_aa)} coefficients",
                do="more tokens (data.tokens=) or a larger penalty",
            )
        weight_AY = torch.zeros_like(self.cross_AY, dtype=torch.float32)
        solved_aY = torch.cholesky_solve(self.cross_AY[used_a].to(dtype), factor_aa, upper=True)
        weight_AY[self.order_A[used_a]] = solved_aY.float()
        return weight_AY.T

    def _system(self, used_a: Int[Tensor, "a"], dtype: torch.dtype) -> Float[Tensor, "a a"]:
        """A copy of the used inputs' moments."""
        if len(used_a) == len(self.gram_AA):
            return self.gram_AA.to(dtype, copy=True)
        return self.gram_AA[used_a][:, used_a].to(dtype)


def _rows(a_TA: Tensor, tokens_t: Tensor) -> Tensor:
    """Those rows; all of them are not copied."""
    return a_TA if len(tokens_t) == len(a_TA) else a_TA.index_select(0, tokens_t)


def solving_dtype(inputs: int, penalty: float) -> torch.dtype:
    """fp64; fp32 for systems that are large and, by their penalty, sound: at half the time.

    The largest eigenvalue is at most the trace, so the condition number is at most inputs / penalty + 1; at 10⁵ of it
    fp32 keeps two digits of what is itself an estimate.
    """
    return torch.float32 if inputs >= LARGE and inputs / penalty <= SOUND else torch.float64
