"""The projection of a global pool: each step is fitted on all layers, and kept if the validation error falls.

The layers share their experts, so they cannot be finished one after the other. Unlike in `layer_pass.py`, their inputs
are those of the dense model, not of the carved one.

With routing fixed, Σ_l E‖FFN_l(x_l) − MoE_l(x_l)‖² / E‖FFN_l(x_l)‖² is a least-squares problem in the down projections.
For all E·N columns at once, the system would be E·N wide. For one expert, fitted to the residual of the others, it is N
wide.

Several workers have samples of different layers. Each fits the routers of its layers; moments and errors are summed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from models.experts import ExpertLoop
from models.routing import LinearRouter, relative_gates
from stages.artifacts.job import ALONE, Workers
from stages.calibration.alignment import at_usual_gates, relative_error, scale_columns, scale_pool
from stages.calibration.batches import LayerSample
from stages.calibration.config import FITTED_ROUTERS
from stages.calibration.normal_equations import NormalEquations
from stages.calibration.share import split_validation
from stages.project.config import ProjectConfig
from stages.routing.fit import RouterSettings, fit_pool_router
from stages.routing.task import set_logit_std, watch_pool

Samples = Sequence[LayerSample | None]  # of every layer; None: another worker has it


def split_batches(samples: Samples, settings: ProjectConfig) -> tuple[list[int], list[int]]:
    """Batches to fit on, and validation batches, the same in all layers; none for a worker without samples."""
    sample = next(filter(None, samples), LayerSample([], []))
    return split_validation(len(sample.inputs), settings.validation_share, sample.sources)


class PoolAlignment(NamedTuple):
    """The layers over their shared experts, and the mean over layers of the relative error on validation batches."""

    loops: Sequence[ExpertLoop]
    error: float
    penalty: float | None  # None: no penalty lowered the error, the columns are unchanged


def align_pool(
    loops: Sequence[ExpertLoop], samples: Samples, settings: ProjectConfig, workers: Workers = ALONE
) -> PoolAlignment:
    """Fit the shared down projections to all layers' outputs; keep the penalty of lowest error, or change nothing."""
    fitted, validation = split_batches(samples, settings)
    before = mean_error(loops, samples, validation, workers) if settings.validate else float("inf")
    best, last = PoolAlignment(loops, before, None), float("inf")
    routed = [RoutedTokens.of(loop, sample, fitted) for loop, sample in zip(loops, samples, strict=True) if sample]
    for penalty in sorted(settings.penalties, reverse=True):
        down_EDN = sweep_experts(loops[0], routed, penalty, settings.pool_sweeps, workers)
        candidate = with_down(loops, down_EDN)
        error = mean_error(candidate, samples, validation, workers)
        if error < best.error:
            best = PoolAlignment(candidate, error, penalty)
        if error > last:
            break  # smaller penalties overfit more
        last = error
    return best


@dataclass(frozen=True)
class RoutedTokens:
    """One layer's tokens, their experts, and the residual of their outputs before anything is fitted."""

    x_TD: Tensor
    places: list[tuple[Tensor, Tensor]]  # of every expert: its tokens, and their gates (t, 1)
    missing_TD: Tensor
    scale: float  # 1 / the root-mean-square norm of the target outputs

    @classmethod
    def of(cls, loop: ExpertLoop, sample: LayerSample, batches: Sequence[int]) -> "RoutedTokens":
        """The layer on these batches."""
        x_TD, wanted_TD = (torch.cat([part[batch] for batch in batches]) for part in (sample.inputs, sample.outputs))
        chosen_TK = loop.router.choose(x_TD, loop.top_k)
        gates_TK = relative_gates(loop.gate, x_TD @ loop.router.rows_ED.T, chosen_TK)
        found = ((chosen_TK == expert).nonzero().unbind(1) for expert in range(loop.router.experts))
        places = [(tokens_t, gates_TK[tokens_t, slots_t, None]) for tokens_t, slots_t in found]
        norm = float(wanted_TD.square().sum(1).mean().sqrt())
        return cls(x_TD, places, wanted_TD - loop(x_TD), 1 / norm if norm else 0.0)

    def served(self, loop: ExpertLoop, expert: int) -> tuple[Tensor, Tensor]:
        """Tokens routed to the expert, and its activations for them, times its gates."""
        tokens_t, gates_t1 = self.places[expert]
        hidden_tN = loop.hidden(self.x_TD[tokens_t], loop.experts.gate_END[expert], loop.experts.up_END[expert])
        return tokens_t, hidden_tN * gates_t1


def sweep_experts(
    loop: ExpertLoop, layers: Sequence[RoutedTokens], penalty: float, sweeps: int, workers: Workers = ALONE
) -> Float[Tensor, "E D N"]:
    """Block coordinate descent: fit one expert of the pool after the other to the residual of the others.

    `loop` is any layer's, since all share the experts; `layers` are those of this worker. The ridge of each step
    penalises the change of the columns. An expert without tokens is unchanged.

    Returns:
        The down projections of the pool.
    """
    down_EDN = loop.experts.down_EDN.clone()
    missing_LTD = [layer.missing_TD.clone() for layer in layers]
    for expert in list(range(len(down_EDN))) * sweeps:
        served = [layer.served(loop, expert) for layer in layers]
        moments = NormalEquations(down_EDN.shape[2], down_EDN.shape[1], device=down_EDN.device)
        for layer, missing_TD, (tokens_t, hidden_tN) in zip(layers, missing_LTD, served, strict=True):
            moments.add(hidden_tN * layer.scale, missing_TD[tokens_t] * layer.scale)
        moments.reduce(workers)
        change_DN = moments.solve_for(workers, penalty)
        down_EDN[expert] += change_DN
        for missing_TD, (tokens_t, hidden_tN) in zip(missing_LTD, served, strict=True):
            missing_TD[tokens_t] -= hidden_tN @ change_DN.T
    return down_EDN


def layer_errors(
    loops: Sequence[ExpertLoop], samples: Samples, batches: Sequence[int], workers: Workers = ALONE
) -> list[float]:
    """Σ‖FFN − MoE‖² / Σ‖FFN‖² of every layer, on the dense model's inputs."""
    errors_L = torch.zeros(len(loops), dtype=torch.float64)
    for layer, (loop, sample) in enumerate(zip(loops, samples, strict=True)):
        if sample:
            errors_L[layer] = relative_error(loop, sample.inputs, sample.outputs, batches)
    workers.sum_(errors_L)
    errors: list[float] = errors_L.tolist()
    return errors


def mean_error(
    loops: Sequence[ExpertLoop], samples: Samples, batches: Sequence[int], workers: Workers = ALONE
) -> float:
    """The mean of `layer_errors`, which are relative, so that late layers with large outputs do not dominate."""
    errors = layer_errors(loops, samples, batches, workers)
    return sum(errors) / len(errors)


@dataclass(frozen=True)
class PoolOutcome:
    """Relative errors of every layer on validation tokens after each step, and the steps kept."""

    errors: dict[str, list[float]]
    penalty: float | None  # None: not aligned
    rounds: int  # of routers and alignment, kept


@torch.no_grad()
def project_pool(
    loops: Sequence[ExpertLoop],
    samples: Samples,
    refits: Sequence[RouterSettings],
    settings: ProjectConfig,
    workers: Workers = ALONE,
) -> tuple[Sequence[ExpertLoop], PoolOutcome]:
    """Alignment, then rounds of routers and alignment.

    `loops` are the layers over the initial pool, `samples` their dense inputs and outputs, `refits` the settings of
    their router refits.
    """
    _, validation = split_batches(samples, settings)
    errors = {"as cut": layer_errors(loops, samples, validation, workers)}
    aligned, kept = PoolAlignment(loops, 0.0, None), 0
    if settings.alignment == "ridge":
        aligned = align_pool(loops, samples, settings, workers)
        errors["after alignment"] = layer_errors(aligned.loops, samples, validation, workers)
        aligned, kept = alternate(loops, aligned, samples, refits, settings, workers)
    errors["at the end"] = layer_errors(aligned.loops, samples, validation, workers)
    return aligned.loops, PoolOutcome(errors, aligned.penalty, kept)


def alternate(
    base: Sequence[ExpertLoop],
    aligned: PoolAlignment,
    samples: Samples,
    refits: Sequence[RouterSettings],
    settings: ProjectConfig,
    workers: Workers = ALONE,
) -> tuple[PoolAlignment, int]:
    """Repeat while it helps: refit the routers to the aligned experts, align the original experts again."""
    chooses = base[0].top_k < len(base[0].neurons_EN)
    rounds = settings.rounds if chooses and refits[0].method in FITTED_ROUTERS else 0
    for kept in range(rounds):
        routers = refit_routers(aligned.loops, samples, refits, workers)
        again = align_pool(reroute_pool(base, routers, samples, workers), samples, settings, workers)
        if settings.validate and again.error >= aligned.error:
            return aligned, kept
        aligned = again
    return aligned, rounds


def refit_routers(
    loops: Sequence[ExpertLoop], samples: Samples, refits: Sequence[RouterSettings], workers: Workers = ALONE
) -> list[LinearRouter]:
    """Routers of the same method, fitted to the current experts."""
    found: dict[int, LinearRouter] = {}
    for layer, (loop, sample, settings) in enumerate(zip(loops, samples, refits, strict=True)):
        if sample:
            usual = at_usual_gates(loop, sample.inputs)
            task = watch_pool(usual, sample.outputs, sample.inputs)
            router = fit_pool_router(task, settings, others=[loop.router])
            found[layer] = set_logit_std(router, sample.inputs, settings.logit_std).to("cpu")
    for others in workers.gather(found):
        found |= others
    return [found[layer].to(loop.router.rows_ED.device) for layer, loop in enumerate(loops)]


def weigh_pool(loops: Sequence[ExpertLoop], samples: Samples, workers: Workers = ALONE) -> list[ExpertLoop]:
    """The pool with its down columns scaled for the gates of all layers together."""
    return scale_shared(loops, scale_pool(loops, inputs_of(samples), workers))


def reroute_pool(
    loops: Sequence[ExpertLoop], routers: Sequence[LinearRouter], samples: Samples, workers: Workers = ALONE
) -> list[ExpertLoop]:
    """The pool behind other routers, with down columns scaled for the new gates."""
    rerouted = [replace(loop, router=router) for loop, router in zip(loops, routers, strict=True)]
    inputs = inputs_of(samples)
    scale_E1 = scale_pool(rerouted, inputs, workers) / scale_pool(loops, inputs, workers)
    return scale_shared(rerouted, scale_E1)


def inputs_of(samples: Samples) -> list[Sequence[Tensor] | None]:
    """The inputs of the layers that this worker has."""
    return [sample.inputs if sample else None for sample in samples]


def scale_shared(loops: Sequence[ExpertLoop], scale_E1: Float[Tensor, "E 1"]) -> list[ExpertLoop]:
    """The layers with scaled down columns, which stay one tensor: gradient projection moves each tensor on its own."""
    return with_down(loops, scale_columns(loops[0], scale_E1).experts.down_EDN)


def with_down(loops: Sequence[ExpertLoop], down_EDN: Float[Tensor, "E D N"]) -> list[ExpertLoop]:
    """The layers over a pool with other down projections."""
    return [replace(loop, experts=replace(loop.experts, down_EDN=down_EDN)) for loop in loops]
