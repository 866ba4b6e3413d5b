"""Behaviour alignment: bend down_proj towards the dense model's output, in closed form.

With routing fixed, E‖target − MoE(x)‖² is a least-squares problem in the down columns; the ridge pulls to the columns
as they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from models.expert_loop import Block
from stages.calibration.guard import split_guard
from stages.calibration.normal_equations import NormalEquations

Target = Callable[[int, Tensor], Tensor]


class Alignable(Protocol):
    """A carved layer, linear in the down columns of its F units."""

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

    alignment_target: str
    penalties: list[float]
    guard_share: float
    guard: bool


@dataclass(frozen=True)
class Alignment(Generic[Carved]):
    """What came of one layer: relative errors are on the guard batches."""

    carved: Carved
    error_before: float
    error_after: float
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
    """Fit the change of the down columns; keep the penalty that is best on the guard batches, or none.

    Args:
        carved: the layer as it is.
        inputs: its FFN inputs, a batch each.
        target: (batch index, its inputs) → wanted outputs (T, D).
        settings: ridge penalties, relative to the mean diagonal of the features' second moment; share of the batches
            held out; and whether the columns stay where no penalty makes the held-out batches better.
    """
    fitted, held_out = split_guard(len(inputs), settings.guard_share)
    moments = NormalEquations(carved.width, inputs[0].shape[1], device=inputs[0].device)
    for index in fitted:
        blocks, output_TD = carved.run(inputs[index])
        moments.add_blocks(blocks, target(index, inputs[index]) - output_TD)
    before = relative_error(carved, inputs, target, held_out)
    best = Alignment(carved, before, before if settings.guard else float("inf"), None)
    last = float("inf")
    for penalty in sorted(settings.penalties, reverse=True):
        candidate = carved.with_change(moments.solve(penalty))
        error = relative_error(candidate, inputs, target, held_out)
        if error < best.error_after:
            best = Alignment(candidate, before, error, penalty)
        if error > last:
            break  # less penalty fits the tokens at hand ever closer, and the held-out ones ever worse
        last = error
    return best
