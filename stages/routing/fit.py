"""A router of one layer, by the name of its method."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from models.routing import LinearRouter, chosen_mask
from stages.calibration.guard import split_guard
from stages.calibration.spread import spread_evenly
from stages.routing.descent import DescentSettings, Sample, descend
from stages.routing.expert_outputs import join, output_error
from stages.routing.methods import is_refitted
from stages.routing.objectives import Imitation, Objective, OutputError
from stages.routing.plain import average_gate_rows, draw_random, fit_centroid, take_representatives
from stages.routing.residual import regress_residual_norms
from stages.routing.ridge import fit_ridge, regress_contributions, regress_log_norms
from stages.routing.task import RouterTask

PENALTY_FACTORS = (0.1, 1.0, 10.0)  # of the ridge penalty, tried where routers are judged before they are trained


@dataclass(frozen=True)
class RouterSettings:
    """What decides a router beside the task."""

    method: str
    penalty: float  # of the ridge, relative to the mean diagonal of the input's second moment
    descent: DescentSettings
    tokens: int  # at most so many are trained on
    guard_share: float = 0.125  # of the batches: held out, nothing is fitted on them
    logit_std: float = 1.0  # that the logits will have, for gates

    def split(self, task: RouterTask) -> tuple[list[int], list[int]]:
        """Batches to fit on, and batches to judge by."""
        return split_guard(len(task.inputs), self.guard_share)


# Rows that are computed, not searched for.
_ROWS: dict[str, Callable[[RouterTask, RouterSettings], Tensor]] = {
    "random": lambda task, settings: draw_random(task, settings.descent.seed),
    "gate_rows": lambda task, _: average_gate_rows(task),
    "representative": lambda task, _: take_representatives(task),
    "centroid": lambda task, _: fit_centroid(task),
    "ridge": lambda task, settings: fit_ridge(task, settings.split(task)[0], settings.penalty).rows_ED,
    "log_ridge": lambda task, settings: (
        regress_log_norms(task, settings.split(task)[0]).router(settings.penalty).rows_ED
    ),
    "residual_ridge": lambda task, settings: regress_residuals(task, settings).rows_ED,
}


def fit_router(task: RouterTask, settings: RouterSettings) -> LinearRouter:
    """The router that `settings.method` names, see `stages/assemble/config.py`."""
    if settings.method in _ROWS:
        return LinearRouter.without_bias(_ROWS[settings.method](task, settings))
    if settings.method == "logistic":
        return imitate(task, settings)
    return lower_error([regress_residuals(task, settings)], task, settings)


def regress_residuals(task: RouterTask, settings: RouterSettings) -> LinearRouter:
    """The ridge regression of what each expert adds beyond what the always-on units foretell."""
    regression = regress_residual_norms(task, settings.split(task)[0], settings.tokens, settings.penalty)
    return regression.router(settings.penalty)


def fit_pool_router(task: RouterTask, settings: RouterSettings, others: Sequence[LinearRouter] = ()) -> LinearRouter:
    """The same over a pool, see `watch_pool`: error starts from what each expert takes off it, or adds in size.

    Args:
        task: of one layer.
        settings: of the router; the method is one of `POOL_ROUTERS`.
        others: routers that error may start from, too.
    """
    if settings.method != "error":
        return fit_router(task, settings)
    fitted, _ = settings.split(task)
    regressions = regress_contributions(task, fitted), regress_log_norms(task, fitted)
    starts = [found.router(settings.penalty * factor) for found in regressions for factor in PENALTY_FACTORS]
    return lower_error([*starts, *others], task, settings)


def refit_router(task: RouterTask, settings: RouterSettings) -> LinearRouter | None:
    """The router of the same method for experts or inputs that have changed; None for methods that fit nothing."""
    return fit_router(task, settings) if is_refitted(settings.method, pooled=False) else None


def refit_pool_router(task: RouterTask, settings: RouterSettings) -> LinearRouter | None:
    """The same over a pool whose experts have changed; None for methods that fit nothing."""
    if not is_refitted(settings.method, pooled=True):
        return None
    return fit_pool_router(task, settings, others=[task.loop.router])


def lower_error(starts: Sequence[LinearRouter], task: RouterTask, settings: RouterSettings) -> LinearRouter:
    """From the best of several routers on by gradient descent; the output error is the judge."""
    if len(starts) == 1 and not settings.descent.steps:  # what experts give need not be looked at
        return starts[0]
    fitted, guard = settings.split(task)
    share = token_share(task, settings)
    sample, judge = (error_sample(task, batches, share, settings.logit_std) for batches in (fitted, guard))
    return train_from(starts, sample, judge, task, settings)


def imitate(task: RouterTask, settings: RouterSettings) -> LinearRouter:
    """From ridge on by gradient descent; the judge is how many of the best experts are missed."""
    fitted, guard = settings.split(task)
    share = token_share(task, settings)
    samples = imitation_sample(task, fitted, share), imitation_sample(task, guard, share)
    return train_from([fit_ridge(task, fitted, settings.penalty)], *samples, task, settings)


def train_from(
    starts: Sequence[LinearRouter],
    sample: Sample[Objective],
    judge: Sample[Objective],
    task: RouterTask,
    settings: RouterSettings,
) -> LinearRouter:
    """The best start by the judge, trained on as long as the judge gains."""
    best = min(starts, key=lambda router: judge.cost(router, task.top_k, settings.descent.balance))
    if not settings.descent.steps or task.top_k == task.experts:  # where all are chosen there is nothing to learn
        return best
    return descend(best, sample, judge, task.top_k, settings.descent, biased=task.biased)


def token_share(task: RouterTask, settings: RouterSettings) -> float:
    """The part of every batch that keeps all of them together within `settings.tokens`."""
    return min(1.0, settings.tokens / max(1, sum(len(x_TD) for x_TD in task.inputs)))


def imitation_sample(task: RouterTask, batches: Sequence[int], share: float) -> Sample[Imitation]:
    """Tokens with the experts of largest contribution."""
    inputs, best = [], []
    for index in batches:
        rows_t = spread_evenly(len(task.inputs[index]), round(len(task.inputs[index]) * share))
        inputs.append(task.inputs[index][rows_t])
        best.append(chosen_mask(task.best_experts(index)[rows_t], task.experts))
    return Sample(torch.cat(inputs), Imitation(torch.cat(best)))


def error_sample(task: RouterTask, batches: Sequence[int], share: float, logit_std: float = 1.0) -> Sample[OutputError]:
    """Tokens with what every expert would give for them."""
    inputs, parts = [], []
    for index in batches:
        x_TD = task.inputs[index]
        rows_t = spread_evenly(len(x_TD), round(len(x_TD) * share))
        inputs.append(x_TD[rows_t])
        parts.append(output_error(task.loop, x_TD[rows_t], task.target(index, x_TD)[rows_t]))
    objective = replace(join(parts), gate=task.loop.gate, logit_std=logit_std)
    return Sample(torch.cat(inputs), objective)
