"""Ridge regression on the FFN input: the router in closed form."""

from collections.abc import Sequence

import torch
from torch import Tensor

from models.routing import LinearRouter
from stages.calibration.normal_equations import NormalEquations
from stages.routing.expert_outputs import output_norms
from stages.routing.task import RouterTask


def fit_ridge(task: RouterTask, batches: Sequence[int], penalty: float) -> LinearRouter:
    """Regress each expert's contribution on the FFN input, on the given batches."""
    return regress_contributions(task, batches).router(penalty)


def regress_contributions(task: RouterTask, batches: Sequence[int]) -> "RouterRegression":
    """Regress each expert's contribution on the FFN input, on the given batches."""
    regression = RouterRegression(task.inputs[0].shape[1], task.experts, task.inputs[0].device)
    for index in batches:
        regression.add(task.inputs[index], task.contributions[index])
    return regression


def regress_log_norms(task: RouterTask, batches: Sequence[int]) -> "RouterRegression":
    """Regress the logarithm of each expert's output norm ‖y_e‖ on the FFN input, on the given batches."""
    regression = RouterRegression(task.inputs[0].shape[1], task.experts, task.inputs[0].device)
    for index in batches:
        regression.add(task.inputs[index], logs(output_norms(task.loop, task.inputs[index])))
    return regression


def logs(norms_TE: Tensor) -> Tensor:
    """Of a token's experts the larger ones are to be chosen, by whatever factor.

    On the scale of the norms themselves a few loud tokens would decide the fit, and a linear function foretells ratios
    better than sums.
    """
    return norms_TE.clamp_min(1e-20).log()


class RouterRegression:
    """Moments of targets that are linear in the input, without intercept: the weight *is* the router's weight.

    What all experts of a token have in common does not change their order: it is taken out of the targets, which the
    regression then need not explain.
    """

    def __init__(self, width: int, experts: int, device: torch.device) -> None:
        """Start from nothing: D inputs, E targets."""
        self._moments = NormalEquations(width, experts, device=device)

    def add(self, x_TD: Tensor, wanted_TE: Tensor) -> None:
        """Add one batch."""
        self._moments.add(x_TD, wanted_TE - wanted_TE.mean(1, keepdim=True))

    def router(self, penalty: float) -> LinearRouter:
        """The router at one ridge penalty, relative to the mean diagonal of the input's second moment."""
        return LinearRouter.without_bias(self._moments.solve(penalty))
