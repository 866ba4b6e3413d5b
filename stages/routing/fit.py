"""A router of one layer, by the name of its method."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from models.routing import LinearRouter, chosen_mask
from stages.calibration.alignment import split_validation
from stages.calibration.batches import evenly_spaced
from stages.routing.descent import DescentSettings, Imitation, Objective, OutputError, Sample, descend
from stages.routing.methods import is_refitted
from stages.routing.ridge import fit_ridge, regress_contributions, regress_log_norms, regress_residual_norms
from stages.routing.task import RouterTask, join, output_error


def draw_random(task: RouterTask, seed: int) -> Float[Tensor, "E D"]:
    """Seeded standard normal rows: the plain start for router training, and the control for the others."""
    like_TD = task.inputs[0]
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(task.experts, like_TD.shape[1], generator=generator).to(like_TD.device)


def fit_centroid(task: RouterTask) -> Float[Tensor, "E D"]:
    """Mean input of the tokens for which the expert is among the K of largest contribution, against the mean of all."""
    experts, hidden_size = task.experts, task.inputs[0].shape[1]
    sums_ED = torch.zeros(experts, hidden_size, device=task.inputs[0].device)
    counts_E = torch.zeros(experts, device=sums_ED.device)
    for index, x_TD in enumerate(task.inputs):
        served_TE = chosen_mask(task.best_experts(index), experts)
        sums_ED += served_TE.T @ x_TD
        counts_E += served_TE.sum(0)
    mean_D = sum(x_TD.sum(0) for x_TD in task.inputs) / sum(len(x_TD) for x_TD in task.inputs)
    centred_ED = sums_ED / counts_E.clamp_min(1)[:, None] - mean_D
    return torch.where(counts_E[:, None] > 0, centred_ED, 0.0)


def average_gate_rows(task: RouterTask) -> Float[Tensor, "E D"]:
    """The mean gate row of an expert's neurons.

    Source: the parameter centres of MoEfication, arXiv:2110.01786.
    """
    rows_ED: Tensor = task.loop.experts.gate_END.mean(1)
    return rows_ED


def take_representatives(task: RouterTask) -> Float[Tensor, "E D"]:
    """The gate row of the neuron whose contribution follows its expert's best: highest correlation over tokens.

    Source: the analytical router of CMoE, arXiv:2502.04416; differs: the row alone, as a linear router has it, and
    correlation instead of the distance to a centroid.
    """
    best_E = [_representative(task, expert) for expert in range(task.experts)]
    rows_ED: Tensor = task.loop.experts.gate_END[torch.arange(task.experts), torch.tensor(best_E)]
    return rows_ED


def _representative(task: RouterTask, expert: int) -> int:
    """Which neuron of one expert correlates best with all of it; the columns' norms change no correlation."""
    loop, sums = task.loop, None
    for x_TD, wanted_TE in zip(task.inputs, task.contributions, strict=True):
        neuron_TN = loop.hidden(x_TD, loop.experts.gate_END[expert], loop.experts.up_END[expert]).abs().double()
        wanted_T = wanted_TE[:, expert].double()
        moments = torch.stack([neuron_TN.sum(0), neuron_TN.square().sum(0), wanted_T @ neuron_TN])
        totals = torch.stack([wanted_T.sum(), wanted_T.new_tensor(len(x_TD))])
        sums = (moments, totals) if sums is None else (sums[0] + moments, sums[1] + totals)
    assert sums is not None, "no calibration batch"
    (first_N, second_N, product_N), (wanted, tokens) = sums
    covariance_N = product_N / tokens - first_N / tokens * (wanted / tokens)
    variance_N = (second_N / tokens - (first_N / tokens).square()).clamp_min(1e-30)
    return int((covariance_N / variance_N.sqrt()).argmax())


PENALTY_FACTORS = (0.1, 1.0, 10.0)  # of the ridge penalty, tried where routers are judged before they are trained


@dataclass(frozen=True)
class RouterSettings:
    """What decides a router beside the task."""

    method: str
    penalty: float  # of the ridge, relative to the mean diagonal of the input's second moment
    descent: DescentSettings
    tokens: int  # at most so many are trained on
    validation_share: float = 0.125  # of the batches: held out, nothing is fitted on them
    logit_std: float = 1.0  # that the logits will have, for gates

    def split(self, task: RouterTask) -> tuple[list[int], list[int]]:
        """Batches to fit on, and batches to judge by."""
        return split_validation(len(task.inputs), self.validation_share)


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
    """The ridge regression of what each expert adds beyond what the always-on neurons foretell."""
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
        rows_t = evenly_spaced(len(task.inputs[index]), round(len(task.inputs[index]) * share))
        inputs.append(task.inputs[index][rows_t])
        best.append(chosen_mask(task.best_experts(index)[rows_t], task.experts))
    return Sample(torch.cat(inputs), Imitation(torch.cat(best)))


def error_sample(task: RouterTask, batches: Sequence[int], share: float, logit_std: float = 1.0) -> Sample[OutputError]:
    """Tokens with what every expert would give for them."""
    inputs, parts = [], []
    for index in batches:
        x_TD = task.inputs[index]
        rows_t = evenly_spaced(len(x_TD), round(len(x_TD) * share))
        inputs.append(x_TD[rows_t])
        parts.append(output_error(task.loop, x_TD[rows_t], task.target(index, x_TD)[rows_t]))
    objective = replace(join(parts), gate=task.loop.gate, logit_std=logit_std)
    return Sample(torch.cat(inputs), objective)
