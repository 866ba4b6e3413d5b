"""Behaviour alignment: fit down_proj to the dense model's output, in closed form.

With routing fixed, E‖target − MoE(x)‖² is a least-squares problem in the down columns; the ridge pulls to the columns
as they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from models.experts import Block
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
