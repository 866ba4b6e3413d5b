"""Fit one layer's router: random, by ridge regression on the FFN input, or by descent from such a regression."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from instruments.device import is_launch_bound, rounded_products
from models.experts import ExpertLoop
from models.routing import LinearRouter
from stages.calibration.normal_equations import NormalEquations
from stages.calibration.share import evenly_spaced, sample_rows, split_validation
from stages.routing.descent import OutputError, RouterSettings, Sample, descend
from stages.routing.task import RouterTask, output_error, output_norms


def regress(task: RouterTask, samples: Iterable[tuple[Tensor, Tensor]]) -> NormalEquations:
    """Linear regression without intercept of targets (T, E) on inputs (T, D); its weight is the router's weight.

    A token's mean over experts does not change their order, so it is subtracted from the targets.
    """
    moments = NormalEquations(task.inputs[0].shape[1], task.experts, device=task.inputs[0].device)
    for x_TD, wanted_TE in samples:
        moments.add(x_TD, wanted_TE - wanted_TE.mean(1, keepdim=True))
    return moments


def logs(norms_TE: Tensor) -> Tensor:
    """Use log norms: only ratios between a token's experts matter.

    Without the logarithm, a few tokens of large norms would dominate the fit; and a linear function predicts ratios
    better than sums.
    """
    return norms_TE.clamp_min(1e-20).log()


MAX_ELEMENTS = 2**26  # of neuron activations in memory at a time: 256 MiB


def regress_residual_norms(task: RouterTask, batches: Sequence[int], tokens: int, penalty: float) -> NormalEquations:
    """Regress the logarithm of each expert's residual norm on the FFN input.

    The residual norm of an expert with neurons i is sqrt(Σ_i (h_i − ĥ_i)²·‖d_i‖²). ĥ_i is the ridge regression of h_i
    on the activations of the always-on neurons, with `penalty` relative to the mean diagonal of their second moment.
    `cluster.method=router_aware` groups neurons by the same measure. At most `tokens` tokens are used.
    """
    x_TD = sample_rows([task.inputs[index] for index in batches], tokens)
    routed = distinct_neurons(task.loop)
    parts = Activations(task.loop, routed, x_TD)
    predicted_RS = regress_on_always_on(parts, penalty)
    left = ((x_tD, torch.addmm(hidden_tR, always_tS, predicted_RS.T, alpha=-1)) for x_tD, always_tS, hidden_tR in parts)
    return regress(task, ((x_tD, logs(routed.expert_norms(left_tR))) for x_tD, left_tR in left))


@dataclass(frozen=True)
class DistinctNeurons:
    """The R neurons of all experts; a neuron with copies in several experts is stored once."""

    gate_RD: Float[Tensor, "R D"]
    up_RD: Float[Tensor, "R D"]
    row_EN: Int[Tensor, "E N"]  # rows of each expert's neurons
    weight_EN: Float[Tensor, "E N"]  # ‖d_i‖

    def expert_norms(self, hidden_tR: Float[Tensor, "t R"]) -> Float[Tensor, "t E"]:
        """sqrt(Σ_i h_i²·‖d_i‖²) over the neurons of every expert.

        A matrix product is avoided: for some sizes its last bits, and so the routers, differ between processes.
        """
        if is_launch_bound(hidden_tR.device):
            hidden_tEN = hidden_tR[:, self.row_EN.flatten()].view(len(hidden_tR), *self.row_EN.shape)
            norms_tE: Tensor = (hidden_tEN * self.weight_EN).norm(dim=2)
            return norms_tE
        experts = zip(self.row_EN, self.weight_EN, strict=True)
        return torch.stack([(hidden_tR[:, row_N] * weight_N).norm(dim=1) for row_N, weight_N in experts], dim=1)


def distinct_neurons(loop: ExpertLoop) -> DistinctNeurons:
    """The neurons of all experts; copies are stored once only if all copies agree in their gate and up rows."""
    gate_PD, up_PD = loop.experts.gate_END.flatten(0, 1), loop.experts.up_END.flatten(0, 1)
    neurons_R, row_EN = torch.unique(loop.neurons_EN, return_inverse=True)
    every_P = torch.arange(len(gate_PD), device=gate_PD.device)
    copy_R = every_P.new_empty(len(neurons_R)).index_copy_(0, row_EN.flatten(), every_P)
    if not all(torch.equal(rows_PD[copy_R][row_EN.flatten()], rows_PD) for rows_PD in (gate_PD, up_PD)):
        copy_R, row_EN = every_P, every_P.view_as(row_EN)
    return DistinctNeurons(gate_PD[copy_R], up_PD[copy_R], row_EN, loop.experts.down_EDN.norm(dim=1))


class Activations:
    """Inputs (t, D), activations of the always-on neurons (t, S) and of the routed ones (t, R), some tokens at a time.

    If all tokens fit into one piece, activations are computed once, else at every iteration.
    """

    def __init__(self, loop: ExpertLoop, routed: DistinctNeurons, x_TD: Float[Tensor, "T D"]) -> None:
        self.loop, self.routed = loop, routed
        self._pieces = torch.split(x_TD, max(1, MAX_ELEMENTS // max(1, len(routed.gate_RD))))
        self._only: tuple[Tensor, Tensor, Tensor] | None = None

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        if len(self._pieces) > 1:
            yield from map(self._compute, self._pieces)
            return
        self._only = self._only or self._compute(self._pieces[0])
        yield self._only

    def _compute(self, x_tD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        experts = self.loop.experts
        with rounded_products(on=["cpu"]):
            always_tS = self.loop.hidden(x_tD, experts.shared_gate_SD, experts.shared_up_SD)
            return x_tD, always_tS, self.loop.hidden(x_tD, self.routed.gate_RD, self.routed.up_RD)


def regress_on_always_on(parts: Activations, penalty: float) -> Float[Tensor, "R S"]:
    """Ridge coefficients that predict the routed neurons from the always-on ones."""
    gate_RD, always_S = parts.routed.gate_RD, parts.loop.always_S
    moments = NormalEquations(len(always_S), len(gate_RD), device=gate_RD.device)
    if not len(always_S):
        return moments.cross_AY.T.float()
    for _, always_tS, hidden_tR in parts:
        moments.add(always_tS, hidden_tR)
    return moments.solve(penalty)


PENALTY_FACTORS = (0.1, 1.0, 10.0)  # of the ridge penalty; all are tried for a pool


def split(task: RouterTask, settings: RouterSettings) -> tuple[list[int], list[int]]:
    """Batches to fit on, and validation batches."""
    return split_validation(len(task.inputs), settings.validation_share, settings.sources)


def draw_random(task: RouterTask, seed: int) -> LinearRouter:
    """Seeded standard normal rows: a start for router training, and the control for the other methods."""
    like_TD = task.inputs[0]
    rows_ED = torch.randn(task.experts, like_TD.shape[1], generator=torch.Generator().manual_seed(seed))
    return LinearRouter.without_bias(rows_ED.to(like_TD.device))


def fit_router(task: RouterTask, settings: RouterSettings) -> LinearRouter:
    """Fit a router by `settings.method`, error or random."""
    if settings.method == "random":
        return draw_random(task, settings.seed)
    found = regress_residual_norms(task, split(task, settings)[0], settings.tokens, settings.penalty)
    router = LinearRouter.without_bias(found.solve(settings.penalty))
    return lower_error([router], task, settings) if settings.steps else router


def fit_pool_router(task: RouterTask, settings: RouterSettings, others: Sequence[LinearRouter] = ()) -> LinearRouter:
    """Fit a router over a pool by `settings.method`, error or random; the task comes from `watch_pool`.

    Method error starts from the best of these: regressions of error drops and of output norms, and `others`.
    """
    if settings.method == "random":
        return draw_random(task, settings.seed)
    fitted, _ = split(task, settings)
    drops = ((task.inputs[index], task.drops[index]) for index in fitted)
    log_norms = ((x_TD, logs(output_norms(task.loop, x_TD))) for x_TD in (task.inputs[index] for index in fitted))
    regressions = regress(task, drops), regress(task, log_norms)
    penalties = [settings.penalty * factor for factor in PENALTY_FACTORS]
    starts = [LinearRouter.without_bias(found.solve(penalty)) for found in regressions for penalty in penalties]
    return lower_error([*starts, *others], task, settings)


def lower_error(starts: Sequence[LinearRouter], task: RouterTask, settings: RouterSettings) -> LinearRouter:
    """Train the start of lowest validation cost."""
    share = min(1.0, settings.tokens / max(1, sum(len(x_TD) for x_TD in task.inputs)))
    fitted, held_out = split(task, settings)
    with rounded_products():
        train = error_sample(task, fitted, share, settings.logit_std)
    validation = error_sample(task, held_out, share, settings.logit_std)
    best = min(starts, key=lambda router: validation.cost(router, task.top_k, settings.balance))
    if not settings.steps or task.top_k == task.experts:  # if all are chosen, there is nothing to learn
        return best
    return descend(best, train, validation, task.top_k, settings)


def error_sample(task: RouterTask, batches: Sequence[int], share: float, logit_std: float) -> Sample:
    """A share of the batches' tokens, and the output error of choosing experts for them."""
    inputs, parts = [], []
    for index in batches:
        rows_t = evenly_spaced(len(task.inputs[index]), round(len(task.inputs[index]) * share))
        rows_t = rows_t.to(task.inputs[index].device)
        inputs.append(task.inputs[index][rows_t])
        part = output_error(task.loop, inputs[-1], task.wanted[index][rows_t])
        parts.append((part.gains_TE, part.overlaps_TEE, part.wanted_T))
    gains_TE, overlaps_TEE, wanted_T = map(torch.cat, zip(*parts, strict=True))
    return Sample(torch.cat(inputs), OutputError(gains_TE, overlaps_TEE, wanted_T, task.loop.gate, logit_std))
