"""A router of one layer, by the name of its method."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.routing import LinearRouter, chosen_mask
from stages.calibration.guard import split_guard
from stages.routing.descent import DescentSettings, Sample, descend
from stages.routing.expert_outputs import join, output_error
from stages.routing.objectives import Imitation
from stages.routing.plain import average_gate_rows, draw_random, fit_centroid, take_representatives
from stages.routing.ridge import fit_ridge
from stages.routing.task import RouterTask

GUARD_SHARE = 0.125


@dataclass(frozen=True)
class RouterSettings:
    """What decides a router beside the task."""

    method: str
    penalty: float  # of the ridge, relative to the mean diagonal of the input's second moment
    descent: DescentSettings
    tokens: int  # at most so many are trained on

    @property
    def trained(self) -> bool:
        """By gradient descent."""
        return self.method in {"logistic", "error"}


def fit_router(task: RouterTask, settings: RouterSettings) -> LinearRouter:
    """random, gate_rows, representative, centroid, ridge; logistic and error go on from ridge by gradient descent."""
    match settings.method:
        case "random":
            return LinearRouter.without_bias(draw_random(task, settings.descent.seed))
        case "gate_rows":
            return LinearRouter.without_bias(average_gate_rows(task))
        case "representative":
            return LinearRouter.without_bias(take_representatives(task))
        case "centroid":
            return LinearRouter.without_bias(fit_centroid(task))
    start = fit_ridge(task, settings.penalty)
    return train_router(start, task, settings) if settings.trained else start


def refit_router(task: RouterTask, settings: RouterSettings) -> LinearRouter | None:
    """The router of the same method for experts or inputs that have changed; None for methods that fit nothing."""
    if settings.trained:
        return train_router(task.loop.router, task, settings)
    return fit_ridge(task, settings.penalty) if settings.method == "ridge" else None


def train_router(start: LinearRouter, task: RouterTask, settings: RouterSettings) -> LinearRouter:
    """Gradient descent on the task's objective, judged on an eighth of the batches."""
    fitted, guard = split_guard(len(task.inputs), GUARD_SHARE)
    make = imitation_sample if settings.method == "logistic" else error_sample
    share = settings.tokens / max(1, sum(len(x_TD) for x_TD in task.inputs))
    samples = make(task, fitted, share), make(task, guard, share)
    return descend(start, *samples, task.top_k, settings.descent, biased=task.biased)


def imitation_sample(task: RouterTask, batches: Sequence[int], share: float) -> Sample:
    """Tokens with the experts of largest contribution."""
    inputs, best = [], []
    for index in batches:
        rows_t = evenly(len(task.inputs[index]), share)
        inputs.append(task.inputs[index][rows_t])
        best.append(chosen_mask(task.best_experts(index)[rows_t], task.experts))
    return Sample(torch.cat(inputs), Imitation(torch.cat(best)))


def error_sample(task: RouterTask, batches: Sequence[int], share: float) -> Sample:
    """Tokens with what every expert would give for them."""
    inputs, parts = [], []
    for index in batches:
        x_TD = task.inputs[index]
        rows_t = evenly(len(x_TD), share)
        inputs.append(x_TD[rows_t])
        parts.append(output_error(task.loop, x_TD[rows_t], task.target(index, x_TD)[rows_t]))
    return Sample(torch.cat(inputs), join(parts))


def evenly(count: int, share: float) -> Tensor:
    """Indices of about `share` of `count`, spread evenly, at least one."""
    wanted = max(1, min(count, round(count * share)))
    return torch.linspace(0, count - 1, wanted).round().long()
