"""The projection of a global pool: each step is tried on all layers, judged on validation tokens, and kept or dropped.

The layers share their experts, so that no layer can be finished before the next one is begun. Unlike `layer.py` this
looks at what the layers see in the dense model, not in the carved one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from models.experts import ExpertLoop, ExpertWeights
from models.routing import LinearRouter
from models.stream import LayerStream
from stages.artifacts.carve import PoolPartition, Routers
from stages.artifacts.experts import CheckpointFormat, load_pool
from stages.artifacts.job import Job, Table
from stages.calibration.alignment import at_usual_gates, scale_columns, scale_pool, split_validation
from stages.calibration.batches import CalibrationContext, LayerSample, sample_layers
from stages.project.config import ProjectConfig
from stages.project.gradient_projection import ProjectionOutcome, project_end_to_end
from stages.project.layer_pass import refit_settings
from stages.project.pool_alignment import align_pool, layer_errors
from stages.project.report import describe_gradients
from stages.routing.fit import RouterSettings, refit_pool_router
from stages.routing.task import set_logit_std, watch_pool


@dataclass(frozen=True)
class PoolCarve:
    """What the earlier stages decided."""

    samples: Sequence[LayerSample]
    refit: Sequence[RouterSettings]  # of every layer
    biased: bool  # routers may have a bias


@dataclass(frozen=True)
class PoolOutcome:
    """Relative errors of every layer on validation tokens, after the step named; and what became of the steps."""

    errors: dict[str, list[float]] = field(default_factory=dict)
    penalty: float | None = None  # None: not aligned
    rounds: int = 0  # of routers and alignment that were kept


@torch.no_grad()
def project_pool(
    carve: PoolCarve, loops: Sequence[ExpertLoop], settings: ProjectConfig
) -> tuple[Sequence[ExpertLoop], PoolOutcome]:
    """Alignment, and rounds of routers and alignment.

    Args:
        carve: the pool and what its layers see.
        loops: the layers over the pool as it starts.
        settings: of the stage.
    """
    _, validation = split_validation(len(carve.samples[0].inputs), settings.validation_share)
    outcome = PoolOutcome({"as cut": layer_errors(loops, carve.samples, validation)})
    loops, outcome = alignment_step(carve, loops, settings, outcome)
    outcome.errors["at the end"] = layer_errors(loops, carve.samples, validation)
    return loops, outcome


def alignment_step(
    carve: PoolCarve,
    loops: Sequence[ExpertLoop],
    settings: ProjectConfig,
    outcome: PoolOutcome,
) -> tuple[Sequence[ExpertLoop], PoolOutcome]:
    """Align; then fit the routers to what came of it and align the unaligned experts again, as long as it helps."""
    if settings.alignment == "none":
        return loops, outcome
    fitted, validation = split_validation(len(carve.samples[0].inputs), settings.validation_share)

    def align(start: Sequence[ExpertLoop]) -> tuple[Sequence[ExpertLoop], float, float | None]:
        return align_pool(
            start,
            carve.samples,
            fitted,
            validation,
            penalties=settings.penalties,
            sweeps=settings.pool_sweeps,
            validate=settings.validate,
        )

    aligned, error, penalty = align(loops)
    errors = outcome.errors | {"after alignment": layer_errors(aligned, carve.samples, validation)}
    kept = 0
    while kept < settings.rounds and loops[0].top_k < len(loops[0].neurons_EN):
        routers = refit_routers(carve, aligned)
        if routers is None:
            break
        again, lower, other = align(reroute_pool(loops, routers, carve.samples))
        if settings.validate and lower >= error:
            break
        aligned, error, penalty, kept = again, lower, other, kept + 1
    return aligned, replace(outcome, errors=errors, penalty=penalty, rounds=kept)


def refit_routers(carve: PoolCarve, loops: Sequence[ExpertLoop]) -> list[LinearRouter] | None:
    """Routers of the same method for the experts as they are now; None for a method that fits nothing."""
    routers = []
    for loop, sample, settings in zip(loops, carve.samples, carve.refit, strict=True):
        usual = at_usual_gates(loop, sample.inputs)
        router = refit_pool_router(watch_pool(usual, sample.target, sample.inputs, biased=carve.biased), settings)
        if router is None:
            return None
        routers.append(set_logit_std(router, sample.inputs, settings.logit_std))
    return routers


def weigh_pool(loops: Sequence[ExpertLoop], samples: Sequence[LayerSample]) -> list[ExpertLoop]:
    """The pool with its down columns scaled to what its gates weigh, all layers together."""
    scale_E1 = scale_pool(loops, [sample.inputs for sample in samples])
    return [scale_columns(loop, scale_E1) for loop in loops]


def reroute_pool(
    loops: Sequence[ExpertLoop], routers: Sequence[LinearRouter], samples: Sequence[LayerSample]
) -> list[ExpertLoop]:
    """The pool behind other routers, its down columns scaled to their gates instead."""
    rerouted = [replace(loop, router=router) for loop, router in zip(loops, routers, strict=True)]
    inputs = [sample.inputs for sample in samples]
    scale_E1 = scale_pool(rerouted, inputs) / scale_pool(loops, inputs)
    return [scale_columns(loop, scale_E1) for loop in rerouted]


def split_pool(loops: Sequence[ExpertLoop], partition: PoolPartition) -> list[ExpertWeights]:
    """What every layer gives to the pool, and its own always-on neurons."""
    first, parts = 0, []
    for loop, given in zip(loops, partition.given, strict=True):
        here, experts = slice(first, first + given), loop.experts
        parts.append(
            replace(
                experts,
                gate_END=experts.gate_END[here],
                up_END=experts.up_END[here],
                down_EDN=experts.down_EDN[here],
            )
        )
        first += given
    return parts


STEPS = ("as cut", "after alignment", "at the end")


def summarise_pool(
    outcome: PoolOutcome, project: ProjectConfig, gradients: ProjectionOutcome | None, partition: PoolPartition
) -> Table:
    """One row per layer: relative error of the FFN's output on validation tokens after each step."""
    rows = [
        [
            layer,
            given,
            *(f"{outcome.errors[step][layer]:.4f}" if step in outcome.errors else "-" for step in STEPS),
        ]
        for layer, given in enumerate(partition.given)
    ]
    columns = ["layer", "experts given", *(f"error {step}" for step in STEPS)]
    notes = [
        describe_pool(outcome, project, gradients),
        "all layers share the experts: errors are on the dense model's own inputs; in the carved one they add up from "
        "layer to layer, which is left to stage=train",
    ]
    return Table("project", columns, rows, notes)


def describe_pool(outcome: PoolOutcome, project: ProjectConfig, gradients: ProjectionOutcome | None) -> str:
    """The projection in a sentence."""
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
    """Write `checkpoint/` and the routers.

    Args:
        job: of the stage.
        context: source and calibration text.
        checkpoint: what is written.
        routers: of stage=assemble.
        project: settings of the stage.
    """
    partition = PoolPartition.load(job.parents["cluster"])
    with LayerStream(context.folder, device=context.device) as stream:
        samples = sample_layers(stream, context.batches, project.pool_tokens)
    pool = load_pool(job.parents["extract"], partition.layers, context.device)
    loops = [
        ExpertLoop(
            experts,
            partition.neurons.to(context.device),
            partition.always_on[layer].to(context.device),
            routers.layer(layer).to(context.device),
            checkpoint.shape.top_k,
            partition.width,
            samples[layer].act,
            checkpoint.gate,
        )
        for layer, experts in enumerate(pool)
    ]
    refit = [
        refit_settings(checkpoint, project, routers.logit_std, context.layer_seed(layer))
        for layer in range(partition.layers)
    ]
    carve = PoolCarve(samples, refit, checkpoint.biased)
    aligned, outcome = project_pool(carve, weigh_pool(loops, samples), project)
    projected, gradients = aligned, None
    if project.gradient_projection:
        projected, gradients = project_end_to_end(
            context.model, context.folder, context.text, lambda _: aligned, project, context.seed
        )
    routers = Routers.of([loop.router for loop in projected], checkpoint.dtype, routers.logit_std)
    routers.save(job.out)
    folder, given = job.out / "checkpoint", split_pool(projected, partition)
    checkpoint.write(folder, routers, lambda layer: given[layer].to("cpu", checkpoint.dtype))
    checkpoint.write_card(folder, context.model, partition, describe_pool(outcome, project, gradients))
    return summarise_pool(outcome, project, gradients, partition)
