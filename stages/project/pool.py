"""The projection of a global pool: each step is fitted on all layers, and kept if the validation error falls.

The layers share their experts, so they cannot be finished one after the other. Unlike in `layer_pass.py`, their inputs
are those of the dense model, not of the carved one.

With routing fixed, Σ_l E‖FFN_l(x_l) − MoE_l(x_l)‖² / E‖FFN_l(x_l)‖² is a least-squares problem in the down projections.
For all E·N columns at once, the system would be E·N wide. For one expert, fitted to the residual of the others, it is N
wide.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from models.experts import ExpertLoop, ExpertWeights
from models.routing import LinearRouter, relative_gates
from models.stream import LayerStream
from stages.artifacts.carve import PoolPartition, Routers
from stages.artifacts.experts import ROUTED, CheckpointFormat, load_pool
from stages.artifacts.job import Job, Table
from stages.calibration.alignment import at_usual_gates, relative_error, scale_columns, scale_pool
from stages.calibration.batches import CalibrationContext, LayerSample, layer_seed, sample_layers
from stages.calibration.config import FITTED_ROUTERS
from stages.calibration.normal_equations import NormalEquations
from stages.calibration.share import split_validation
from stages.project.config import ProjectConfig
from stages.project.gradient_projection import ProjectionOutcome, describe_gradients, project_end_to_end
from stages.project.layer_pass import refit_settings
from stages.routing.fit import RouterSettings, fit_pool_router
from stages.routing.task import set_logit_std, watch_pool


class PoolAlignment(NamedTuple):
    """The layers over their shared experts, and the mean over layers of the relative error on validation batches."""

    loops: Sequence[ExpertLoop]
    error: float
    penalty: float | None  # None: no penalty lowered the error, the columns are unchanged


def align_pool(loops: Sequence[ExpertLoop], samples: Sequence[LayerSample], settings: ProjectConfig) -> PoolAlignment:
    """Fit the shared down projections to all layers' outputs; keep the penalty of lowest error, or change nothing."""
    fitted, validation = split_validation(len(samples[0].inputs), settings.validation_share)
    before = mean_error(loops, samples, validation) if settings.validate else float("inf")
    best, last = PoolAlignment(loops, before, None), float("inf")
    routed = [RoutedTokens.of(loop, sample, fitted) for loop, sample in zip(loops, samples, strict=True)]
    for penalty in sorted(settings.penalties, reverse=True):
        down_EDN = sweep_experts(loops[0], routed, penalty, settings.pool_sweeps)
        candidate = with_down(loops, down_EDN)
        error = mean_error(candidate, samples, validation)
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
    loop: ExpertLoop, layers: Sequence[RoutedTokens], penalty: float, sweeps: int
) -> Float[Tensor, "E D N"]:
    """Block coordinate descent: fit one expert of the pool after the other to the residual of the others.

    `loop` is any layer's, since all share the experts. The ridge of each step penalises the change of the columns. An
    expert without tokens is unchanged.

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
        change_DN = moments.solve(penalty)
        down_EDN[expert] += change_DN
        for missing_TD, (tokens_t, hidden_tN) in zip(missing_LTD, served, strict=True):
            missing_TD[tokens_t] -= hidden_tN @ change_DN.T
    return down_EDN


def layer_errors(loops: Sequence[ExpertLoop], samples: Sequence[LayerSample], batches: Sequence[int]) -> list[float]:
    """Σ‖FFN − MoE‖² / Σ‖FFN‖² of every layer, on the dense model's inputs."""
    return [
        relative_error(loop, sample.inputs, sample.outputs, batches)
        for loop, sample in zip(loops, samples, strict=True)
    ]


def mean_error(loops: Sequence[ExpertLoop], samples: Sequence[LayerSample], batches: Sequence[int]) -> float:
    """The mean of `layer_errors`, which are relative, so that late layers with large outputs do not dominate."""
    errors = layer_errors(loops, samples, batches)
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
    samples: Sequence[LayerSample],
    refits: Sequence[RouterSettings],
    settings: ProjectConfig,
) -> tuple[Sequence[ExpertLoop], PoolOutcome]:
    """Alignment, then rounds of routers and alignment.

    `loops` are the layers over the initial pool, `samples` their dense inputs and outputs, `refits` the settings of
    their router refits.
    """
    _, validation = split_validation(len(samples[0].inputs), settings.validation_share)
    errors = {"as cut": layer_errors(loops, samples, validation)}
    aligned, kept = PoolAlignment(loops, 0.0, None), 0
    if settings.alignment == "ridge":
        aligned = align_pool(loops, samples, settings)
        errors["after alignment"] = layer_errors(aligned.loops, samples, validation)
        aligned, kept = alternate(loops, aligned, samples, refits, settings)
    errors["at the end"] = layer_errors(aligned.loops, samples, validation)
    return aligned.loops, PoolOutcome(errors, aligned.penalty, kept)


def alternate(
    base: Sequence[ExpertLoop],
    aligned: PoolAlignment,
    samples: Sequence[LayerSample],
    refits: Sequence[RouterSettings],
    settings: ProjectConfig,
) -> tuple[PoolAlignment, int]:
    """Repeat while it helps: refit the routers to the aligned experts, align the original experts again."""
    chooses = base[0].top_k < len(base[0].neurons_EN)
    rounds = settings.rounds if chooses and refits[0].method in FITTED_ROUTERS else 0
    for kept in range(rounds):
        routers = refit_routers(aligned.loops, samples, refits)
        again = align_pool(reroute_pool(base, routers, samples), samples, settings)
        if settings.validate and again.error >= aligned.error:
            return aligned, kept
        aligned = again
    return aligned, rounds


def refit_routers(
    loops: Sequence[ExpertLoop], samples: Sequence[LayerSample], refits: Sequence[RouterSettings]
) -> list[LinearRouter]:
    """Routers of the same method, fitted to the current experts."""
    routers = []
    for loop, sample, settings in zip(loops, samples, refits, strict=True):
        usual = at_usual_gates(loop, sample.inputs)
        task = watch_pool(usual, sample.outputs, sample.inputs)
        router = fit_pool_router(task, settings, others=[loop.router])
        routers.append(set_logit_std(router, sample.inputs, settings.logit_std))
    return routers


def weigh_pool(loops: Sequence[ExpertLoop], samples: Sequence[LayerSample]) -> list[ExpertLoop]:
    """The pool with its down columns scaled for the gates of all layers together."""
    return scale_shared(loops, scale_pool(loops, [sample.inputs for sample in samples]))


def reroute_pool(
    loops: Sequence[ExpertLoop], routers: Sequence[LinearRouter], samples: Sequence[LayerSample]
) -> list[ExpertLoop]:
    """The pool behind other routers, with down columns scaled for the new gates."""
    rerouted = [replace(loop, router=router) for loop, router in zip(loops, routers, strict=True)]
    inputs = [sample.inputs for sample in samples]
    scale_E1 = scale_pool(rerouted, inputs) / scale_pool(loops, inputs)
    return scale_shared(rerouted, scale_E1)


def scale_shared(loops: Sequence[ExpertLoop], scale_E1: Float[Tensor, "E 1"]) -> list[ExpertLoop]:
    """The layers with scaled down columns, which stay one tensor: gradient projection moves each tensor on its own."""
    return with_down(loops, scale_columns(loops[0], scale_E1).experts.down_EDN)


def with_down(loops: Sequence[ExpertLoop], down_EDN: Float[Tensor, "E D N"]) -> list[ExpertLoop]:
    """The layers over a pool with other down projections."""
    return [replace(loop, experts=replace(loop.experts, down_EDN=down_EDN)) for loop in loops]


def split_pool(loops: Sequence[ExpertLoop], partition: PoolPartition) -> list[ExpertWeights]:
    """Every layer's own experts of the pool, and its always-on neurons."""
    ends = accumulate(partition.given)
    return [
        replace(loop.experts, **{name: getattr(loop.experts, name)[end - given : end] for name in ROUTED})
        for loop, given, end in zip(loops, partition.given, ends, strict=True)
    ]


STEPS = ("as cut", "after alignment", "at the end")


def summarise_pool(
    outcome: PoolOutcome, project: ProjectConfig, gradients: ProjectionOutcome | None, partition: PoolPartition
) -> Table:
    """One row per layer: relative error of the FFN's output on validation tokens after each step."""
    rows = [
        [layer, given, *(f"{outcome.errors[step][layer]:.4f}" if step in outcome.errors else "-" for step in STEPS)]
        for layer, given in enumerate(partition.given)
    ]
    columns = ["layer", "experts given", *(f"error {step}" for step in STEPS)]
    notes = [
        describe_pool(outcome, project, gradients),
        "all layers share the experts: errors are on the dense model's inputs; in the carved model they add up from "
        "layer to layer, and only stage=train corrects this",
    ]
    return Table("project", columns, rows, notes)


def describe_pool(outcome: PoolOutcome, project: ProjectConfig, gradients: ProjectionOutcome | None) -> str:
    """The projection in one sentence."""
    aligned = "off" if project.alignment == "none" else "dropped, since no penalty lowered the validation error"
    if outcome.penalty is not None:
        aligned = f"ridge, {project.pool_sweeps} sweeps over the experts, penalty {outcome.penalty:g}"
    said = [f"alignment {aligned}"]
    said += [f"{outcome.rounds} rounds of routers and alignment kept"] if outcome.rounds else []
    return "; ".join([*said, describe_gradients(gradients)])


@torch.no_grad()
def run_pool(
    job: Job, context: CalibrationContext, checkpoint: CheckpointFormat, routers: Routers, project: ProjectConfig
) -> Table:
    """Write `checkpoint/` and the routers; `routers` are those of stage=assemble."""
    partition = PoolPartition.load(job.parents["cluster"])
    with LayerStream(context.folder, device=context.device) as stream:
        samples = sample_layers(stream, context.batches, project.pool_tokens, context.memory)
    loops = [
        checkpoint.loop(partition, layer, experts, routers.layer(layer), samples[layer].act, context.device)
        for layer, experts in enumerate(load_pool(job.parents["extract"], partition.layers, context.device))
    ]
    refits = [
        refit_settings(checkpoint, project, routers.logit_std, layer_seed(context.seed, layer))
        for layer in range(partition.layers)
    ]
    projected, outcome = project_pool(weigh_pool(loops, samples), samples, refits, project)
    gradients = None
    if project.gradient_projection:
        aligned = projected
        projected, gradients = project_end_to_end(context, lambda _: aligned, project)
    given = split_pool(projected, partition)
    checkpoint.write(
        job.out,
        {layer: loop.router for layer, loop in enumerate(projected)},
        routers.logit_std,
        lambda layer: given[layer].to("cpu", checkpoint.dtype),
        partition,
        describe_pool(outcome, project, gradients),
    )
    return summarise_pool(outcome, project, gradients, partition)
