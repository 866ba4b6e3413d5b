"""Behaviour alignment: bend down_proj towards the dense model's output, in closed form.

With routing fixed, E‖target − MoE(x)‖² is a least-squares problem in the down columns; the ridge pulls to the columns
as they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from stages.calibration.carved_ffn import CarvedFFN
from stages.calibration.normal_equations import NormalEquations

Target = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True)
class Alignment:
    """What came of one layer: relative errors are on the guard batches."""

    carved: CarvedFFN
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


def split_guard(batches: int, share: float) -> tuple[list[int], list[int]]:
    """Batches to fit on and batches to judge by, the latter spread evenly; at least one of each where there are two."""
    guards = min(max(1, round(share * batches)), max(0, batches - 1))
    held = {round((index + 0.5) * batches / guards - 0.5) for index in range(guards)} if guards else set()
    fitted = [index for index in range(batches) if index not in held]
    return fitted, sorted(held) or fitted


@torch.no_grad()
def align_down(
    carved: CarvedFFN,
    inputs: Sequence[Float[Tensor, "T D"]],
    target: Target,
    *,
    penalties: Sequence[float],
    guard_share: float,
) -> Alignment:
    """Fit the change of the down columns; keep the penalty that is best on the guard batches, or none.

    Args:
        carved: the layer as it is.
        inputs: its FFN inputs, a batch each.
        target: (batch index, its inputs) → wanted outputs (T, D).
        penalties: ridge penalties, relative to the mean diagonal of the features' second moment.
        guard_share: share of the batches held out.
    """
    fitted, guard = split_guard(len(inputs), guard_share)
    moments = NormalEquations(carved.ffn.width, len(carved.down_DF), device=carved.down_DF.device)
    for index in fitted:
        features_TF = carved.features(inputs[index])
        moments.add(features_TF, target(index, inputs[index]) - features_TF @ carved.down_DF.T)
    before = relative_error(carved, inputs, target, guard)
    best = Alignment(carved, before, before, None)
    for penalty in penalties:
        candidate = carved.with_change(moments.solve(penalty).to(carved.down_DF))
        error = relative_error(candidate, inputs, target, guard)
        if error < best.error_after:
            best = Alignment(candidate, before, error, penalty)
    return best
