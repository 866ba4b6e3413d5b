"""Ridge regression of what each expert contributes on the FFN input: the router in closed form."""

from models.routing import LinearRouter
from stages.calibration.normal_equations import NormalEquations
from stages.routing.task import RouterTask


def fit_ridge(task: RouterTask, penalty: float) -> LinearRouter:
    """Regress each expert's contribution on the FFN input, without intercept.

    The regression is linear, so its weight is the router's weight. What all experts of a token have in common does not
    change their order: it is taken out of the targets, which the regression then need not explain.
    """
    moments = NormalEquations(task.inputs[0].shape[1], task.experts, device=task.inputs[0].device)
    for x_TD, wanted_TE in zip(task.inputs, task.contributions, strict=True):
        moments.add(x_TD, wanted_TE - wanted_TE.mean(1, keepdim=True))
    return LinearRouter.without_bias(moments.solve(penalty))
