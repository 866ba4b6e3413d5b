"""Behaviour alignment: fit down_proj to the dense model's output by ridge regression, and scale it for the gates."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, Self, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from instruments.errors import NumericsError
from models.experts import Block, ExpertLoop, sum_blocks
from models.routing import has_copies, membership, relative_gates
from stages.artifacts.job import Workers
from stages.calibration.share import Share

FP32_MIN_INPUTS = 2048  # least number of inputs for fp32
FP32_MAX_CONDITION = 1e5  # greatest condition number for fp32
PANEL = 512  # rows of the upper triangle added at a time


class NormalEquations:
    """Moments of min_W Σ_t ‖y_t − W a_t‖² + λ‖W‖², with λ = penalty × the mean diagonal of Σ a aᵀ.

    Products are fp32, sums fp64. Only the upper triangle of `gram_AA` is used; its rows are in the order of `order_A`.
    """

    def __init__(self, inputs: int, outputs: int, *, device: torch.device | None = None) -> None:
        """Zero moments of A inputs and Y outputs."""
        self.gram_AA = torch.zeros(inputs, inputs, dtype=torch.float64, device=device)
        self.cross_AY = torch.zeros(inputs, outputs, dtype=torch.float64, device=device)
        self.order_A = torch.arange(inputs, device=device)  # input of each row of the moments
        self.rows = 0

    def add(self, a_TA: Float[Tensor, "T A"], y_TY: Float[Tensor, "T Y"]) -> None:
        """Add one batch of rows."""
        self.gram_AA += (a_TA.T @ a_TA).to(self.gram_AA)
        self.cross_AY += (a_TA.T @ y_TY).to(self.cross_AY)
        self.rows += len(a_TA)

    def add_blocks(self, blocks: Sequence[Block], y_TY: Float[Tensor, "T Y"]) -> None:
        """Add one batch of rows that are zero outside the blocks; all batches have blocks of the same neurons.

        If the blocks are disjoint, the cost is proportional to their share of non-zero elements.
        """
        neurons_P = torch.cat([block.neurons_N for block in blocks])
        if bool((torch.bincount(neurons_P) > 1).any()):
            self._add_overlapping(blocks, y_TY)
        else:
            self._add_disjoint(blocks, neurons_P, y_TY)
        self.rows += len(y_TY)

    def _add_disjoint(self, blocks: Sequence[Block], neurons_P: Int[Tensor, "P"], y_TY: Float[Tensor, "T Y"]) -> None:
        """Multiply each block with itself and all later ones, on its own rows: one product per block, half of all."""
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
        """Sum blocks that share neurons, and multiply zeros too, because a few large products are faster."""
        a_TA = sum_blocks(blocks, len(y_TY), len(self.gram_AA))
        for start in range(0, len(self.gram_AA), PANEL):
            rows = slice(start, start + PANEL)
            self.gram_AA[rows, start:] += (a_TA[:, rows].T @ a_TA[:, start:]).to(self.gram_AA)
        self.cross_AY += (a_TA.T @ y_TY).to(self.cross_AY)

    def reduce(self, workers: Workers) -> None:
        """Sum the moments of all workers at the leading one. Raises LostWorkerError."""
        if workers.world == 1:
            return
        parts = workers.gather((self.rows, self.order_A.cpu()))
        # A worker that added no rows does not know the order.
        self.order_A = next((order_A for rows, order_A in parts if rows), self.order_A).to(self.order_A.device)
        self.rows = sum(rows for rows, _ in parts)
        workers.reduce_(self.gram_AA)
        workers.reduce_(self.cross_AY)

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
        if not (self.gram_AA.sum().isfinite() and self.cross_AY.sum().isfinite()):
            raise NumericsError(
                "the calibration moments are not finite", do="calibrate in float32: model.dtype=float32"
            )
        scale = self.gram_AA.diagonal().mean()
        if scale == 0:
            # All inputs are zero (a pruned layer).
            return torch.zeros_like(self.cross_AY.T).float()
        # Inputs that are always zero (neurons of no active expert) get zero weights and are left out of the system.
        used_a = self.gram_AA.diagonal().nonzero()[:, 0]
        dtype = solving_dtype(len(used_a), penalty)
        every = len(used_a) == len(self.gram_AA)
        system_aa = self.gram_AA.to(dtype, copy=True) if every else self.gram_AA[used_a][:, used_a].to(dtype)
        system_aa.diagonal().copy_(self.gram_AA.diagonal()[used_a] + penalty * scale)
        factor_aa, failed = torch.linalg.cholesky_ex(system_aa, upper=True)
        if failed:
            what = f"{self.rows} calibration tokens do not determine {len(system_aa)} coefficients"
            raise NumericsError(what, do="more tokens (data.tokens=) or a larger penalty")
        weight_AY = torch.zeros_like(self.cross_AY, dtype=torch.float32)
        solved_aY = torch.cholesky_solve(self.cross_AY[used_a].to(dtype), factor_aa, upper=True)
        weight_AY[self.order_A[used_a]] = solved_aY.float()
        return weight_AY.T


def ridge_cholesky(gram_AA: Float[Tensor, "A A"], penalty: float) -> Float[Tensor, "A A"]:
    """Lower Cholesky factor, fp64, of G with a ridge; `penalty` is relative to the mean diagonal of G."""
    system_AA = gram_AA.double()
    system_AA.diagonal().add_(penalty * system_AA.diagonal().mean() + 1e-30)
    factor_AA: Tensor = torch.linalg.cholesky(system_AA)
    return factor_AA


def _rows(a_TA: Tensor, tokens_t: Tensor) -> Tensor:
    """The tokens' rows, without a copy if they are all rows."""
    return a_TA if len(tokens_t) == len(a_TA) else a_TA.index_select(0, tokens_t)


def solving_dtype(inputs: int, penalty: float) -> torch.dtype:
    """fp64; fp32, at half the time, for systems that are large and well conditioned by their penalty.

    The largest eigenvalue is at most the trace, so the condition number is at most inputs / penalty + 1. At 10⁵, fp32
    keeps two digits, enough for an estimate.
    """
    return torch.float32 if inputs >= FP32_MIN_INPUTS and inputs / penalty <= FP32_MAX_CONDITION else torch.float64


class Alignable(Protocol):
    """A carved layer, linear in the down columns of its F neurons."""

    @property
    def width(self) -> int:
        """F."""

    def __call__(self, x_TD: Tensor) -> Tensor:
        """Output (T, D)."""

    def run(self, x_TD: Tensor) -> tuple[list[Block], Tensor]:
        """The non-zero factors of the down columns, as blocks, and the output (T, D)."""

    def with_change(self, change_DF: Tensor) -> Self:
        """The layer with `change_DF` added to the columns."""


Carved = TypeVar("Carved", bound=Alignable)


class AlignmentSettings(Protocol):
    """The settings of a stage that alignment reads."""

    penalties: list[float]
    validation_share: float
    validate: bool


@dataclass(frozen=True)
class Alignment(Generic[Carved]):
    """One layer and its relative error on validation batches."""

    carved: Carved
    error: float
    penalty: float | None  # None: no penalty lowered the error, the columns are unchanged
    less_fitted: Carved | None = None  # the columns of the next larger penalty; None: not tried


def relative_error(
    carved: Callable[[Tensor], Tensor], inputs: Sequence[Tensor], wanted: Sequence[Tensor], batches: Sequence[int]
) -> float:
    """Σ‖wanted − y‖² / Σ‖wanted‖² over the given batches of all workers."""

    def measure(place: int) -> Tensor:
        missed_TD = wanted[place] - carved(inputs[place])
        return torch.stack([missed_TD.double().square().sum(), wanted[place].double().square().sum()])

    missed, total = Share.of(inputs).total((2,), measure, batches).tolist()
    return missed / total if total else 0.0


@torch.no_grad()
def align_down(
    carved: Carved, inputs: Sequence[Tensor], wanted: Sequence[Tensor], settings: AlignmentSettings
) -> Alignment[Carved]:
    """Fit a change of the down columns; keep the penalty of the lowest validation error, or change nothing.

    `inputs` are the layer's FFN inputs, (T, D) per batch, possibly shared by several workers; `wanted` are its target
    outputs for them, (T, D). Penalties are relative to the mean diagonal of the features' second moment.
    """
    share = Share.of(inputs)
    fitted, validation = share.split(settings.validation_share)
    moments = NormalEquations(carved.width, share.like.shape[1], device=share.like.device)
    for _, place in share.places(fitted):
        blocks, output_TD = carved.run(inputs[place])
        moments.add_blocks(blocks, wanted[place] - output_TD)
    moments.reduce(share.workers)
    before = relative_error(carved, inputs, wanted, validation) if settings.validate else float("inf")
    best = Alignment(carved, before, None)
    last, larger = float("inf"), None
    for penalty in sorted(settings.penalties, reverse=True):
        candidate = carved.with_change(moments.solve_for(share.workers, penalty))
        error = relative_error(candidate, inputs, wanted, validation)
        if error < best.error:
            best = Alignment(candidate, error, penalty, larger)
        if error > last:
            break  # smaller penalties overfit more
        last, larger = error, candidate
    return best


def gate_weights(loop: ExpertLoop, x_TD: Float[Tensor, "T D"]) -> Float[Tensor, "T E"]:
    """Gates of the chosen experts, relative to those of equal logits; 0 for the others."""
    chosen_TK = loop.router.choose(x_TD, loop.top_k)
    gates_TK = relative_gates(loop.gate, x_TD @ loop.router.rows_ED.T, chosen_TK)
    return x_TD.new_zeros(len(x_TD), loop.router.experts).scatter_(1, chosen_TK, gates_TK)


def gate_moments(loop: ExpertLoop, inputs: Sequence[Tensor]) -> Float[Tensor, "2 E"]:
    """Σ_t g and Σ_t g² of every expert over the tokens that choose it, fp64."""
    return sum_moments(inputs, lambda x_TD: gate_weights(loop, x_TD), loop.router.experts)


def sum_moments(inputs: Sequence[Tensor], weigh: Callable[[Tensor], Tensor], columns: int) -> Float[Tensor, "2 A"]:
    """Σ_t w and Σ_t w² of every column of the weights (T, A), over the tokens of all workers, fp64."""

    def measure(place: int) -> Tensor:
        weights_TA = weigh(inputs[place]).double()
        return torch.stack([weights_TA.sum(0), weights_TA.square().sum(0)])

    return Share.of(inputs).total((2, columns), measure)


def least_squares(moments_2E: Float[Tensor, "2 E"]) -> Float[Tensor, "E"]:
    """Σ g / Σ g²: the constant c for which c·g is nearest to 1; 1 for experts without tokens."""
    first_E, second_E = moments_2E
    return torch.where(second_E > 0, first_E / second_E.clamp_min(1e-30), 1.0).float()


def column_scale(loop: ExpertLoop, inputs: Sequence[Tensor]) -> Float[Tensor, "E N"]:
    """Factors for each expert's down columns that bring the weight of their neurons closest to 1 (least squares).

    The factor is the expert's own constant, see `least_squares`, times that of the neuron if it has copies:
    Σ_t c_j / Σ_t c_j² over the tokens for which neuron j is active, c_j being the sum of its copies' scaled gates.
    They depend on the loop's gates and choices, not on its experts' weights.

    Numerics: 1 where gates are constant and no copies are active together; 1/multiplicity where all experts are on.
    """
    expert_E = least_squares(gate_moments(loop, inputs))
    neurons_EN = loop.neurons_EN.long()
    if not has_copies(neurons_EN):
        return expert_E[:, None].expand(neurons_EN.shape)
    member_EF = membership(neurons_EN, loop.width) * expert_E[:, None]
    moments_2F = sum_moments(inputs, lambda x_TD: gate_weights(loop, x_TD) @ member_EF, loop.width)
    return expert_E[:, None] * least_squares(moments_2F)[neurons_EN]


def scale_columns(loop: ExpertLoop, scale_EN: Float[Tensor, "E #N"]) -> ExpertLoop:
    """The layer with every expert's down columns scaled."""
    return replace(loop, experts=replace(loop.experts, down_EDN=loop.experts.down_EDN * scale_EN[:, None]))


def scale_pool(loops: Sequence[ExpertLoop], inputs: Sequence[Sequence[Tensor]]) -> Float[Tensor, "E 1"]:
    """`column_scale` for a pool: one constant per expert, over the tokens of all layers. Its neurons have no copies."""
    moments_L2E = torch.stack([gate_moments(loop, seen) for loop, seen in zip(loops, inputs, strict=True)])
    return least_squares(moments_L2E.sum(0))[:, None]


def at_usual_gates(loop: ExpertLoop, inputs: Sequence[Tensor]) -> ExpertLoop:
    """The layer with each expert's columns scaled by its usual gate, so that a router can be fitted without gates."""
    return scale_columns(loop, 1 / least_squares(gate_moments(loop, inputs))[:, None])
