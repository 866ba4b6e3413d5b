"""A router of one layer, by the name of its method."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from models.routing import LinearRouter
from stages.calibration.alignment import split_validation
from stages.calibration.batches import evenly_spaced
from stages.routing.descent import DescentSettings, Sample, descend
from stages.routing.methods import FITTED_ROUTERS
from stages.routing.ridge import regress_contributions, regress_log_norms, regress_residual_norms
from stages.routing.task import RouterTask, join, output_error

PENALTY_FACTORS = (0.1, 1.0, 10.0)  # of the ridge penalty, tried over a pool


@dataclass(frozen=True)
class RouterSettings:
    """All that decides a router, the task apart."""

    method: str
    penalty: float  # of the ridge, relative to the mean diagonal of the input's second moment
    descent: DescentSettings
    tokens: int  # to train on, at most
    validation_share: float = 0.125  # of the batches: held out, nothing is fitted on them
    logit_std: float = 1.0  # of the logits that the checkpoint will have

    def split(self, task: RouterTask) -> tuple[list[int], list[int]]:
        """Batches to fit on, and validation batches."""
        return split_validation(len(task.inputs), self.validation_share)


def draw_random(task: RouterTask, seed: int) -> LinearRouter:
    """Seeded standard normal rows: the plain start for router training, and the control for the others."""
    like_TD = task.inputs[0]
    rows_ED = torch.randn(task.experts, like_TD.shape[1], generator=torch.Generator().manual_seed(seed))
    return LinearRouter.without_bias(rows_ED.to(like_TD.device))


def fit_router(task: RouterTask, settings: RouterSettings) -> LinearRouter:
    """The router that `settings.method` names, see `stages/assemble/config.py`."""
    if settings.method == "random":
        return draw_random(task, settings.descent.seed)
    found = regress_residual_norms(task, settings.split(task)[0], settings.tokens, settings.penalty)
    router = found.router(settings.penalty)
    if settings.method == "residual_ridge" or not settings.descent.steps:
        return router
    return lower_error([router], task, settings)


def fit_pool_router(task: RouterTask, settings: RouterSettings, others: Sequence[LinearRouter] = ()) -> LinearRouter:
    """The same over a pool, see `watch_pool`: error starts from the drop of the error, or from output norms.

    Args:
        task: of one layer.
        settings: of the router; the method is one of `POOL_ROUTERS`.
        others: routers that error may start from, too.
    """
    if settings.method == "random":
        return draw_random(task, settings.descent.seed)
    fitted, _ = settings.split(task)
    regressions = regress_contributions(task, fitted), regress_log_norms(task, fitted)
    starts = [found.router(settings.penalty * factor) for found in regressions for factor in PENALTY_FACTORS]
    return lower_error([*starts, *others], task, settings)


def refit_router(task: RouterTask, settings: RouterSettings) -> LinearRouter | None:
    """The router of the same method for experts or inputs that have changed; None for one that fits nothing."""
    return fit_router(task, settings) if settings.method in FITTED_ROUTERS else None


def refit_pool_router(task: RouterTask, settings: RouterSettings) -> LinearRouter | None:
    """The same over a pool whose experts have changed."""
    if settings.method not in FITTED_ROUTERS:
        return None
    return fit_pool_router(task, settings, others=[task.loop.router])


def lower_error(starts: Sequence[LinearRouter], task: RouterTask, settings: RouterSettings) -> LinearRouter:
    """Train the router of lowest validation error among several."""
    share = min(1.0, settings.tokens / max(1, sum(len(x_TD) for x_TD in task.inputs)))
    train, validation = (error_sample(task, batches, share, settings.logit_std) for batches in settings.split(task))
    best = min(starts, key=lambda router: validation.cost(router, task.top_k, settings.descent.balance))
    if not settings.descent.steps or task.top_k == task.experts:  # where all are chosen there is nothing to learn
        return best
    return descend(best, train, validation, task.top_k, settings.descent, biased=task.biased)


def error_sample(task: RouterTask, batches: Sequence[int], share: float, logit_std: float = 1.0) -> Sample:
    """A share of the batches' tokens, with the output that every expert would give for them."""
    inputs, parts = [], []
    for index in batches:
        x_TD = task.inputs[index]
        rows_t = evenly_spaced(len(x_TD), round(len(x_TD) * share))
        inputs.append(x_TD[rows_t])
        parts.append(output_error(task.loop, x_TD[rows_t], task.target(index, x_TD)[rows_t]))
    objective = replace(join(parts), gate=task.loop.gate, logit_std=logit_std)
    return Sample(torch.cat(inputs), objective)
