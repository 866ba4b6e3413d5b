"""The projection of a global pool as a stage: read and share the pool, fit it, write and report it."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from models.experts import ExpertLoop, ExpertWeights
from models.stream import LayerStream
from stages.artifacts.carve import PoolPartition, Routers
from stages.artifacts.experts import ROUTED, CheckpointFormat, load_pool
from stages.artifacts.job import NOTHING, Job, Table, Workers
from stages.calibration.batches import CalibrationContext, layer_seed, sample_layers
from stages.project.config import ProjectConfig
from stages.project.gradient_projection import ProjectionOutcome, describe_gradients, project_end_to_end
from stages.project.layer_pass import refit_settings
from stages.project.pool import PoolOutcome, project_pool, weigh_pool


def part_pool(loops: Sequence[ExpertLoop], workers: Workers) -> Sequence[ExpertLoop]:
    """A worker's part of the pool, see `ExpertLoop.part`; its layers share it."""
    if workers.world == 1:
        return loops
    parts: list[ExpertLoop] = []
    for loop in loops:
        part = loop.part(workers.rank, workers.world)
        shared = {name: getattr((*parts, part)[0].experts, name) for name in ROUTED}
        parts.append(replace(part, experts=replace(part.experts, **shared)))
    return parts


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
    partition, workers = PoolPartition.load(job.parents["cluster"]), job.workers
    with LayerStream(context.folder, device=context.device) as stream:
        samples, act = sample_layers(stream, context.batches, project.pool_tokens, workers, context.memory)
    loops = [
        checkpoint.loop(partition, layer, experts, routers.layer(layer), act, context.device)
        for layer, experts in enumerate(load_pool(job.parents["extract"], partition.layers, context.device))
    ]
    sources = [batch.source for batch in context.batches]
    refits = [
        refit_settings(checkpoint, project, routers.logit_std, layer_seed(context.seed, layer), sources)
        for layer in range(partition.layers)
    ]
    weighed = weigh_pool(loops, samples, workers)
    projected, outcome = project_pool(weighed, samples, refits, project, workers)
    gradients = None
    if project.gradient_projection:
        parts = part_pool(projected, workers)
        projected, gradients = project_end_to_end(context, lambda _: parts, project)
    if not workers.leads:
        return NOTHING
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
