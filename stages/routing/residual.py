"""What an expert adds beyond what the always-on units foretell of it: alignment gives the rest without routing."""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from models.expert_loop import ExpertLoop
from stages.calibration.normal_equations import NormalEquations
from stages.calibration.spread import spread_evenly
from stages.routing.ridge import RouterRegression, logs
from stages.routing.task import RouterTask

NUMBERS = 2**26  # of unit activations in memory at a time: 256 MiB


def regress_residual_norms(task: RouterTask, batches: Sequence[int], tokens: int, penalty: float) -> RouterRegression:
    """Regress the logarithm of each expert's residual on the FFN input.

    Of an expert's units i it is sqrt(Σ_i (h_i − ĥ_i)²·‖d_i‖²), with ĥ_i the ridge regression of h_i on the activations
    of the always-on units. The partition `captured` is made for the same measure.

    Args:
        task: of one layer.
        batches: to fit on.
        tokens: at most so many are looked at, spread evenly over the batches.
        penalty: of the regression on the always-on units, relative to the mean diagonal of their second moment.
    """
    x_TD = torch.cat([task.inputs[index] for index in batches])
    x_TD = x_TD[spread_evenly(len(x_TD), tokens)]
    foretold_PS = regress_on_always_on(task.loop, x_TD, penalty)
    regression = RouterRegression(x_TD.shape[1], task.experts, x_TD.device)
    for x_tD, always_tS, hidden_tP in activations(task.loop, x_TD):
        hidden_tP.addmm_(always_tS, foretold_PS.T, alpha=-1)
        regression.add(x_tD, logs(expert_norms(task.loop, hidden_tP)))
    return regression


def regress_on_always_on(loop: ExpertLoop, x_TD: Float[Tensor, "T D"], penalty: float) -> Float[Tensor, "P S"]:
    """Coefficients of every expert's units, P = E·N, on the always-on units."""
    experts, units, _ = loop.experts.gate_END.shape
    moments = NormalEquations(len(loop.always_S), experts * units, device=x_TD.device)
    if not len(loop.always_S):
        return moments.cross_AY.T.float()
    for _, always_tS, hidden_tP in activations(loop, x_TD):
        moments.add(always_tS, hidden_tP)
    return moments.solve(penalty)


def activations(loop: ExpertLoop, x_TD: Float[Tensor, "T D"]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Inputs (t, D), activations of the always-on units (t, S) and of the experts' (t, E·N), some tokens at once."""
    experts = loop.experts
    gate_PD, up_PD = experts.gate_END.flatten(0, 1), experts.up_END.flatten(0, 1)
    for x_tD in torch.split(x_TD, max(1, NUMBERS // max(1, len(gate_PD)))):
        always_tS = loop.hidden(x_tD, experts.shared_gate_SD, experts.shared_up_SD)
        yield x_tD, always_tS, loop.hidden(x_tD, gate_PD, up_PD)


def expert_norms(loop: ExpertLoop, hidden_tP: Float[Tensor, "t P"]) -> Float[Tensor, "t E"]:
    """sqrt(Σ_i h_i²·‖d_i‖²) over the units of every expert."""
    weight_EN = loop.experts.down_EDN.norm(dim=1)
    norms_tE: Tensor = (hidden_tP.view(-1, *weight_EN.shape) * weight_EN).norm(dim=2)
    return norms_tE
