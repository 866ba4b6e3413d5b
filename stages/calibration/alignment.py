"""Behaviour alignment: fit down_proj to the dense model's output by ridge regression, and scale it for the gates."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, Self, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from instruments.device import rounded_products
from models.experts import Block, ExpertLoop
from models.routing import has_copies, membership
from stages.calibration.normal_equations import NormalEquations
from stages.calibration.share import Share


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
Fitted = TypeVar("Fitted")


class AlignmentSettings(Protocol):
    """The settings of a stage that alignment reads."""

    penalties: list[float]
    validation_share: float
    validate: bool


@dataclass(frozen=True)
class Alignment(Generic[Fitted]):
    """One layer, or the layers of a pool, and the relative error on validation batches."""

    carved: Fitted
    error: float
    penalty: float | None = None  # None: no penalty lowered the error, the columns are unchanged
    less_fitted: Fitted | None = None  # the columns of the next larger penalty; None: not tried


def relative_error(
    carved: Callable[[Tensor], Tensor], inputs: Sequence[Tensor], wanted: Sequence[Tensor], batches: Sequence[int]
) -> float:
    """Σ‖wanted − y‖² / Σ‖wanted‖² over the given batches of all workers."""

    def measure(place: int) -> Tensor:
        with rounded_products(on=["cpu"]):  # 1e-5 of the wanted outputs at most
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
    moments = sum_features(carved, inputs, wanted, fitted)
    return search_penalty(
        carved,
        lambda penalty: carved.with_change(moments.solve_for(share.workers, penalty)),
        lambda candidate: relative_error(candidate, inputs, wanted, validation),
        settings,
    )


def search_penalty(
    start: Fitted, fit: Callable[[float], Fitted], measure: Callable[[Fitted], float], settings: AlignmentSettings
) -> Alignment[Fitted]:
    """Fit with ever smaller penalties; keep the fit of the lowest error, or the `start`."""
    best = Alignment(start, measure(start) if settings.validate else float("inf"))
    last, larger = float("inf"), None
    for penalty in sorted(settings.penalties, reverse=True):
        candidate = fit(penalty)
        error = measure(candidate)
        if error < best.error:
            best = Alignment(candidate, error, penalty, larger)
        if error > last:
            break  # smaller penalties overfit more
        last, larger = error, candidate
    return best


def sum_features(
    carved: Alignable, inputs: Sequence[Tensor], wanted: Sequence[Tensor], batches: Sequence[int]
) -> NormalEquations:
    """Moments of the features of the down columns and what the output misses, over the given batches of all workers."""
    share = Share.of(inputs)
    moments = NormalEquations(carved.width, share.like.shape[1], device=share.like.device)
    for _, place in share.places(batches):
        with rounded_products(on=["cpu"]):
            blocks, output_TD = carved.run(inputs[place])
        moments.add_blocks(blocks, wanted[place] - output_TD)
    moments.reduce(share.workers)
    return moments


def gate_moments(loop: ExpertLoop, inputs: Sequence[Tensor]) -> Float[Tensor, "2 E"]:
    """Σ_t g and Σ_t g² of every expert over the tokens that choose it, fp64."""
    return sum_moments(inputs, loop.gates, loop.router.experts)


def sum_moments(inputs: Sequence[Tensor], weigh: Callable[[Tensor], Tensor], columns: int) -> Float[Tensor, "2 A"]:
    """Σ_t w and Σ_t w² of every column of the weights (T, A), over the tokens of all workers, fp64."""

    def measure(place: int) -> Tensor:
        weights_TA = weigh(inputs[place]).double()
        return torch.stack([weights_TA.sum(0), weights_TA.square().sum(0)])

    return Share.of(inputs).total((2, columns), measure)


def neuron_moments(
    inputs: Sequence[Tensor], weigh: Callable[[Tensor], Tensor], member_EF: Float[Tensor, "E F"]
) -> Float[Tensor, "2 F"]:
    """`sum_moments` of the experts' weights (T, E) @ `member_EF`; neurons with equal columns are summed once."""
    columns_EA, column_F = torch.unique(member_EF, dim=1, return_inverse=True)
    return sum_moments(inputs, lambda x_TD: weigh(x_TD) @ columns_EA, columns_EA.shape[1])[:, column_F]


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
    return expert_E[:, None] * least_squares(neuron_moments(inputs, loop.gates, member_EF))[neurons_EN]


def scale_columns(loop: ExpertLoop, scale_EN: Float[Tensor, "E #N"]) -> ExpertLoop:
    """The layer with every expert's down columns scaled."""
    return replace(loop, experts=replace(loop.experts, down_EDN=loop.experts.down_EDN * scale_EN[:, None]))


def at_usual_gates(loop: ExpertLoop, inputs: Sequence[Tensor]) -> ExpertLoop:
    """The layer with each expert's columns scaled by its usual gate, so that a router can be fitted without gates."""
    return scale_columns(loop, 1 / least_squares(gate_moments(loop, inputs))[:, None])
