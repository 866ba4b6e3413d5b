"""Behaviour alignment: fit down_proj to the dense model's output in closed form, and scale it to what gates weigh.

With routing fixed, E‖target − MoE(x)‖² is a least-squares problem in the down columns; the ridge pulls to the columns
as they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, Self, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from models.experts import Block, ExpertLoop
from models.routing import has_copies, membership, relative_gates
from stages.calibration.normal_equations import NormalEquations


def split_validation(batches: int, share: float) -> tuple[list[int], list[int]]:
    """Batches to fit on and validation batches, evenly spaced; at least one of each where there are two."""
    count = min(max(1, round(share * batches)), max(0, batches - 1))
    validation = {round((index + 0.5) * batches / count - 0.5) for index in range(count)} if count else set()
    fitted = [index for index in range(batches) if index not in validation]
    return fitted, sorted(validation) or fitted


Target = Callable[[int, Tensor], Tensor]


class Alignable(Protocol):
    """A carved layer, linear in the down columns of its F neurons."""

    @property
    def width(self) -> int:
        """F."""

    def __call__(self, x_TD: Tensor) -> Tensor:
        """Output (T, D)."""

    def run(self, x_TD: Tensor) -> tuple[list[Block], Tensor]:
        """What the columns are multiplied with, wherever it is not zero, and the output (T, D)."""

    def with_change(self, change_DF: Tensor) -> Self:
        """The same with something added to the columns."""


Carved = TypeVar("Carved", bound=Alignable)


class AlignmentSettings(Protocol):
    """What of a stage's settings concerns alignment."""

    penalties: list[float]
    validation_share: float
    validate: bool


@dataclass(frozen=True)
class Alignment(Generic[Carved]):
    """One layer and its relative error on validation batches."""

    carved: Carved
    error: float
    penalty: float | None  # None: nothing made it better, the columns stayed


def relative_error(
    carved: Callable[[Tensor], Tensor], inputs: Sequence[Tensor], target: Target, batches: Sequence[int]
) -> float:
    """Σ‖target − y‖² / Σ‖target‖² over the given batches."""
    missed, total = 0.0, 0.0
    for index in batches:
        wanted_TD = target(index, inputs[index])
        missed += float((wanted_TD - carved(inputs[index])).double().square().sum())
        total += float(wanted_TD.double().square().sum())
    return missed / total if total else 0.0


@torch.no_grad()
def align_down(
    carved: Carved,
    inputs: Sequence[Tensor],
    target: Target,
    settings: AlignmentSettings,
) -> Alignment[Carved]:
    """Fit the change of the down columns; keep the penalty of the lowest validation error, or none.

    Args:
        carved: the layer as it is.
        inputs: its FFN inputs, a batch each.
        target: (batch index, its inputs) → wanted outputs (T, D).
        settings: ridge penalties, relative to the mean diagonal of the features' second moment; share of the batches
            in the validation split; and whether the columns stay where no penalty lowers the validation error.
    """
    fitted, validation = split_validation(len(inputs), settings.validation_share)
    moments = NormalEquations(carved.width, inputs[0].shape[1], device=inputs[0].device)
    for index in fitted:
        blocks, output_TD = carved.run(inputs[index])
        moments.add_blocks(blocks, target(index, inputs[index]) - output_TD)
    before = relative_error(carved, inputs, target, validation) if settings.validate else float("inf")
    best = Alignment(carved, before, None)
    last = float("inf")
    for penalty in sorted(settings.penalties, reverse=True):
        candidate = carved.with_change(moments.solve(penalty))
        error = relative_error(candidate, inputs, target, validation)
        if error < best.error:
            best = Alignment(candidate, error, penalty)
        if error > last:
            break  # less penalty fits the tokens at hand ever closer, and the validation tokens ever worse
        last = error
    return best


def gate_weights(loop: ExpertLoop, x_TD: Float[Tensor, "T D"]) -> Float[Tensor, "T E"]:
    """The gates of the chosen experts, relative to equal logits; 0 elsewhere."""
    chosen_TK = loop.router.choose(x_TD, loop.top_k)
    gates_TK = relative_gates(loop.gate, x_TD @ loop.router.rows_ED.T, chosen_TK)
    return x_TD.new_zeros(len(x_TD), loop.router.experts).scatter_(1, chosen_TK, gates_TK)


def gate_moments(loop: ExpertLoop, inputs: Sequence[Tensor]) -> Float[Tensor, "2 E"]:
    """Σ_t g and Σ_t g² of every expert over the tokens that choose it, fp64."""
    device = loop.router.rows_ED.device
    moments_2E = torch.zeros(2, loop.router.experts, dtype=torch.float64, device=device)
    for x_TD in inputs:
        weights_TE = gate_weights(loop, x_TD).double()
        moments_2E += torch.stack([weights_TE.sum(0), weights_TE.square().sum(0)])
    return moments_2E


def least_squares(moments_2E: Float[Tensor, "2 E"]) -> Float[Tensor, "E"]:
    """Σ g / Σ g²: the constant c for which c·g is nearest to 1; 1 where there are no tokens."""
    first_E, second_E = moments_2E
    return torch.where(second_E > 0, first_E / second_E.clamp_min(1e-30), 1.0).float()


def column_scale(loop: ExpertLoop, inputs: Sequence[Tensor]) -> Float[Tensor, "E N"]:
    """What each expert's down columns are to be multiplied by, so that their neurons weigh 1 on average.

    First each expert's own constant; then, where neurons are in several experts, that of the sum of their copies:
    Σ_t c_j / Σ_t c_j² over the tokens for which neuron j is active, c_j the sum of its copies' scaled gates.

    Args:
        loop: the layer; its gates and its choice count, its weights do not.
        inputs: FFN inputs, a batch each.
    Numerics: 1 where gates are constant and no copies are active together; 1/multiplicity where all experts are on.
    """
    expert_E = least_squares(gate_moments(loop, inputs))
    neurons_EN = loop.neurons_EN.long()
    if not has_copies(neurons_EN):
        return expert_E[:, None].expand(neurons_EN.shape)
    member_EF = membership(neurons_EN, loop.width) * expert_E[:, None]
    moments_2F = torch.zeros(2, loop.width, dtype=torch.float64, device=expert_E.device)
    for x_TD in inputs:
        copies_TF = (gate_weights(loop, x_TD) @ member_EF).double()
        moments_2F += torch.stack([copies_TF.sum(0), copies_TF.square().sum(0)])
    return expert_E[:, None] * least_squares(moments_2F)[neurons_EN]


def scale_columns(loop: ExpertLoop, scale_EN: Float[Tensor, "E #N"]) -> ExpertLoop:
    """The layer with every expert's down columns multiplied."""
    return replace(loop, experts=replace(loop.experts, down_EDN=loop.experts.down_EDN * scale_EN[:, None]))


def scale_pool(loops: Sequence[ExpertLoop], inputs: Sequence[Sequence[Tensor]]) -> Float[Tensor, "E 1"]:
    """The same for a pool: one constant per expert, over the tokens of all layers. Neurons have no copies there."""
    moments = [gate_moments(loop, seen) for loop, seen in zip(loops, inputs, strict=True)]
    return least_squares(torch.stack(moments).sum(0))[:, None]


def at_usual_gates(loop: ExpertLoop, inputs: Sequence[Tensor]) -> ExpertLoop:
    """The layer with each expert's columns as large as its gates make them, for a router to be fitted to."""
    return scale_columns(loop, 1 / least_squares(gate_moments(loop, inputs))[:, None])
