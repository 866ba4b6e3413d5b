"""Ridge regressions in closed form, and how few F × F matrices they keep in memory."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from instruments.device import rounded_products
from instruments.errors import NumericsError
from models.experts import Block, sum_blocks
from models.routing import has_copies
from stages.artifacts.job import Workers

FP32_MIN_INPUTS = 2048  # least number of inputs for fp32
FP32_MAX_CONDITION = 1e5  # greatest condition number for fp32
PANEL = 512  # rows of the second moment that are stored, and added, together


class NormalEquations:
    """Moments of min_W Σ_t ‖y_t − W a_t‖² + λ‖W‖², with λ = penalty × the mean diagonal of Σ a aᵀ.

    Products are fp32, on a GPU with factors in TF32 if the setting allows it; sums are fp64. The rows of Σ a aᵀ are in
    the order of `order_A`.
    Memory: half an A × A matrix in fp64, and a whole one, of `solving_dtype`, while `solve` runs.
    """

    def __init__(self, inputs: int, outputs: int, *, device: torch.device | None = None) -> None:
        """Zero moments of A inputs and Y outputs."""
        # Σ a aᵀ without what is below the diagonal: PANEL rows each, with the columns from their first row's diagonal.
        self.panels = [
            torch.zeros(min(PANEL, inputs - start), inputs - start, dtype=torch.float64, device=device)
            for start in range(0, inputs, PANEL)
        ]
        self.cross_AY = torch.zeros(inputs, outputs, dtype=torch.float64, device=device)
        self.order_A = torch.arange(inputs, device=device)  # input of each row of the moments
        self.rows = 0
        self._overlapping = False

    def add(self, a_TA: Float[Tensor, "T A"], y_TY: Float[Tensor, "T Y"]) -> None:
        """Add one batch of rows."""
        with rounded_products():
            self._add_rows(0, a_TA.T @ a_TA)
            self.cross_AY += a_TA.T @ y_TY
        self.rows += len(a_TA)

    def add_blocks(self, blocks: Sequence[Block], y_TY: Float[Tensor, "T Y"]) -> None:
        """Add one batch of rows that are zero outside the blocks; all batches have blocks of the same neurons.

        If the blocks are disjoint, the cost is proportional to their share of non-zero elements.
        """
        if not self.rows:  # once, because a GPU's host waits for it
            neurons_P = torch.cat([block.neurons_N for block in blocks])
            self._overlapping = has_copies(neurons_P)
            if not self._overlapping:
                others = torch.isin(self.order_A, neurons_P, invert=True)
                self.order_A = torch.cat([neurons_P, self.order_A[others]])
        with rounded_products():
            (self._add_overlapping if self._overlapping else self._add_disjoint)(blocks, y_TY)
        self.rows += len(y_TY)

    def _add_disjoint(self, blocks: Sequence[Block], y_TY: Float[Tensor, "T Y"]) -> None:
        """Multiply each block with itself and all later ones, on its own rows: about half of all products."""
        ends = torch.tensor([len(block.neurons_N) for block in blocks]).cumsum(0).tolist()
        a_TP = y_TY.new_zeros(len(y_TY), ends[-1])
        for (tokens_t, neurons_N, hidden_tN), end in zip(blocks, ends, strict=True):
            a_TP[:, end - len(neurons_N) : end].index_copy_(0, tokens_t, hidden_tN)
        for (tokens_t, neurons_N, hidden_tN), end in zip(blocks, ends, strict=True):
            start = end - len(neurons_N)
            later_tP = _rows(a_TP[:, start:], tokens_t)
            for first in range(0, len(neurons_N), PANEL):  # nothing below the diagonal of a wide block
                self._add_rows(start + first, hidden_tN[:, first : first + PANEL].T @ later_tP[:, first:])
            self.cross_AY[start:end] += hidden_tN.T @ _rows(y_TY, tokens_t)

    def _add_overlapping(self, blocks: Sequence[Block], y_TY: Float[Tensor, "T Y"]) -> None:
        """Sum blocks that share neurons, and multiply zeros too, because a few large products are faster."""
        a_TA = sum_blocks(blocks, len(y_TY), len(self.order_A))
        for start in range(0, len(self.order_A), PANEL):
            self._add_rows(start, a_TA[:, start : start + PANEL].T @ a_TA[:, start:])
        self.cross_AY += a_TA.T @ y_TY

    def _add_rows(self, start: int, product_NP: Float[Tensor, "N P"]) -> None:
        """Add rows of Σ a aᵀ from `start` on, given from column `start` on."""
        end = start + len(product_NP)
        for number in range(start // PANEL, -(-end // PANEL)):
            first = number * PANEL
            top, bottom = max(start, first), min(end, first + PANEL)
            rows_PP = product_NP[top - start : bottom - start, top - start :]
            self.panels[number][top - first : bottom - first, top - first :][:, : rows_PP.shape[1]] += rows_PP

    def reduce(self, workers: Workers) -> None:
        """Sum the moments of all workers at the leading one, which alone keeps them. Raises LostWorkerError."""
        if workers.world == 1:
            return
        parts = workers.gather((self.rows, self.order_A.cpu()))
        # A worker that added no rows does not know the order.
        self.order_A = next((order_A for rows, order_A in parts if rows), self.order_A).to(self.order_A.device)
        self.rows = sum(rows for rows, _ in parts)
        for panel_PA in self.panels:
            workers.reduce_(panel_PA)
        workers.reduce_(self.cross_AY)
        if not workers.leads:
            self.panels.clear()

    def solve_for(self, workers: Workers, penalty: float) -> Float[Tensor, "Y A"]:
        """W for every worker, after `reduce`; one worker solves. Raises NumericsError, LostWorkerError."""
        if workers.world == 1:
            return self.solve(penalty)
        if workers.leads:
            weight_YA = self.solve(penalty).contiguous()
        else:
            weight_YA = torch.empty_like(self.cross_AY.T, dtype=torch.float32, memory_format=torch.contiguous_format)
        workers.copy_(weight_YA)
        return weight_YA

    def solve(self, penalty: float) -> Float[Tensor, "Y A"]:
        """W of the ridge regression, fp32.

        Raises:
            NumericsError: the moments are not finite, or not positive definite even with the penalty.
        """
        # The sum is finite only if all values are; isfinite() of the moments would allocate a tensor of their size.
        sums = torch.stack([part.sum() for part in (*self.panels, self.cross_AY)])
        diagonal_A = torch.cat([panel_PA.diagonal() for panel_PA in self.panels])
        scale = diagonal_A.mean()
        finite, zero = torch.stack([sums.isfinite().all(), scale == 0]).tolist()  # one wait for a GPU
        if not finite:
            raise NumericsError(
                "the calibration moments are not finite", do="calibrate in float32: model.dtype=float32"
            )
        if zero:
            # All inputs are zero (a pruned layer).
            return torch.zeros_like(self.cross_AY.T).float()
        # Inputs that are always zero (neurons of no active expert) get zero weights and are left out of the system.
        used_a = diagonal_A.nonzero()[:, 0]
        system_aa = self.upper(used_a, solving_dtype(len(used_a), penalty))
        system_aa.diagonal().copy_(diagonal_A[used_a] + penalty * scale)
        if not _factor_in_place(system_aa, upper=True):
            raise NumericsError(
                f"{self.rows} calibration tokens do not determine {len(system_aa)} coefficients",
                do="more tokens (data.tokens=) or a larger penalty",
            )
        solved_aY = _by_columns(
            self.cross_AY if len(used_a) == len(diagonal_A) else self.cross_AY[used_a], system_aa.dtype
        )
        # cholesky_solve would copy the factor.
        torch.linalg.solve_triangular(system_aa.mT, solved_aY, upper=False, out=solved_aY)
        torch.linalg.solve_triangular(system_aa, solved_aY, upper=True, out=solved_aY)
        del system_aa
        weight_AY = torch.zeros_like(self.cross_AY, dtype=torch.float32)
        weight_AY[self.order_A[used_a]] = solved_aY.float()
        return weight_AY.T

    def upper(self, used_a: Int[Tensor, "a"], dtype: torch.dtype) -> Float[Tensor, "a a"]:
        """Σ a aᵀ of the rows `used_a`, stored by columns; undefined below the diagonal."""
        system_aa = self.cross_AY.new_empty(len(used_a), len(used_a), dtype=dtype).mT
        firsts = range(0, len(self.order_A), PANEL)
        starts = torch.searchsorted(used_a, torch.tensor([*firsts], device=used_a.device)).tolist()
        for panel_PA, first, start, end in zip(self.panels, firsts, starts, [*starts[1:], len(used_a)], strict=True):
            if len(used_a) < len(self.order_A):
                panel_PA = panel_PA[used_a[start:end] - first][:, used_a[start:] - first]  # noqa: PLW2901
            system_aa[start:end, start:] = panel_PA
        return system_aa


def ridge_cholesky(gram_AA: Float[Tensor, "A A"], penalty: float) -> Float[Tensor, "A A"]:
    """Lower Cholesky factor, fp64 and stored by columns, of G with a ridge relative to the mean diagonal of G.

    Raises:
        NumericsError: G is not finite, or not positive definite even with the ridge.
    """
    system_AA = _by_columns(gram_AA, torch.float64)
    system_AA.diagonal().add_(penalty * system_AA.diagonal().mean() + 1e-30)
    if not _factor_in_place(system_AA, upper=False):
        what = "the calibration moments are not finite, or not positive definite"
        raise NumericsError(what, do="calibrate in float32: model.dtype=float32")
    return system_AA


def _factor_in_place(system_aa: Tensor, *, upper: bool) -> bool:
    """Replace a matrix stored by columns by its Cholesky factor; False: it is not positive definite.

    Without `out`, torch would keep matrix and factor.
    """
    failed = torch.empty((), dtype=torch.int32, device=system_aa.device)
    torch.linalg.cholesky_ex(system_aa, upper=upper, out=(system_aa, failed))
    # A GPU fails for no number that is not finite (pytorch/pytorch#64818); the factor's diagonal shows it.
    return bool((failed == 0) & system_aa.diagonal().isfinite().all())


def _by_columns(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy in the order of LAPACK, so that torch makes no other."""
    return torch.empty_like(matrix.mT, dtype=dtype, memory_format=torch.contiguous_format).mT.copy_(matrix)


def _rows(a_TA: Tensor, tokens_t: Tensor) -> Tensor:
    """The tokens' rows, without a copy if they are all rows."""
    return a_TA if len(tokens_t) == len(a_TA) else a_TA.index_select(0, tokens_t)


def solving_dtype(inputs: int, penalty: float) -> torch.dtype:
    """fp64; fp32, at half the time, for systems that are large and well conditioned by their penalty.

    The largest eigenvalue is at most the trace, so the condition number is at most inputs / penalty + 1. At 10⁵, fp32
    keeps two digits, enough for an estimate.
    """
    return torch.float32 if inputs >= FP32_MIN_INPUTS and inputs / penalty <= FP32_MAX_CONDITION else torch.float64
