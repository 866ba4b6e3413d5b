"""project: fit the experts to the dense model, layer by layer or as a pool, then end to end; write the checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import torch
from transformers import PreTrainedModel

from models.config import ModelConfig, MoEShape
from models.experts import ExpertLoop, ExpertWeights
from models.ffn import ffn_modules
from models.loading import execution_device, release_freed_memory
from models.stream import LayerStream
from stages.artifacts.carve import Partition, Routers
from stages.artifacts.experts import ROUTED, CheckpointFormat, FormatSettings, load_pool
from stages.artifacts.job import NOTHING, Job, Table, Workers
from stages.artifacts.tensor_file import load_layer_checkpoint, save_layer_checkpoint
from stages.calibration.batches import CalibrationContext, layer_seed, sample_layers, text_sources
from stages.calibration.config import VocabularyConfig
from stages.calibration.number_format import check_number_format
from stages.project.config import ProjectConfig
from stages.project.gradient_projection import ProjectionOutcome, describe_gradients, project_end_to_end
from stages.project.layer_pass import Outcome, ProjectedLayer, find_done, project_all, refit_settings
from stages.project.pool import PoolFit, PoolOutcome, with_down
from stages.text.config import DataConfig


def run(
    job: Job,
    *,
    model: ModelConfig,
    data: DataConfig,
    vocabulary: VocabularyConfig,
    assemble: FormatSettings,
    project: ProjectConfig,
    shape: MoEShape,
    seed: int,
) -> Table:
    """Write `checkpoint/` and the routers; every step is evaluated on validation tokens."""
    context = CalibrationContext.of(model, data, vocabulary, seed, job)
    checkpoint = CheckpointFormat.of(context.model, context.folder, assemble, shape)
    routers = Routers.load(job.parents["assemble"])
    run_topology = run_pool if shape.pooled else run_layers
    table = run_topology(job, context, checkpoint, routers, project)
    if job.workers.leads:
        written, share = job.out / "checkpoint", project.validation_share
        check_number_format(written, checkpoint.dtype, context.text, context.model, job.scratch, share)
    return table


def run_layers(
    job: Job, context: CalibrationContext, checkpoint: CheckpointFormat, routers: Routers, project: ProjectConfig
) -> Table:
    """Write `checkpoint/` and the routers; `routers` are those of stage=assemble."""
    partition = Partition.load(job.parents["cluster"])
    with LayerStream(context.folder, device=context.device) as stream:
        layers = project_all(job, stream, context, checkpoint, partition, routers, project)
    outcomes = {index: outcome for index, (_, outcome) in layers.items()}
    final, gradients = job.scratch, None
    if project.gradient_projection:
        final = job.scratch / "projected"
        gradients = project_layers(context, partition, checkpoint, project, outcomes, aligned=job.scratch, kept=final)
    release_freed_memory()
    if not job.workers.leads:
        return NOTHING
    said = describe(outcomes, project, gradients)
    fitted = {index: router for index, (router, _) in layers.items()}
    checkpoint.write(job.out, fitted, routers.logit_std, lambda layer: find_done(final, layer).experts, partition, said)
    return summarise(outcomes, [said], project)


def project_layers(
    context: CalibrationContext,
    partition: Partition,
    checkpoint: CheckpointFormat,
    project: ProjectConfig,
    outcomes: Mapping[int, Outcome],
    *,
    aligned: Path,
    kept: Path,
) -> ProjectionOutcome:
    """Gradient projection of the layers in the folder `aligned`; the results are saved in the folder `kept`."""
    depth, workers = partition.layers, context.workers

    def find_outcome() -> ProjectionOutcome | None:
        whole = all(load_layer_checkpoint(kept, layer, ProjectedLayer) is not None for layer in outcomes)
        return load_layer_checkpoint(kept, depth, ProjectionOutcome) if whole else None

    if outcome := workers.lead(find_outcome):
        return outcome

    def make_loops(dense: PreTrainedModel) -> list[ExpertLoop | None]:
        loops: list[ExpertLoop | None] = [None] * depth
        for index in outcomes:
            layer, mlp = find_done(aligned, index), ffn_modules(dense)[index]
            device = execution_device(mlp.gate_proj)
            loop = checkpoint.loop(partition, index, layer.experts, layer.router, mlp.act_fn, device)
            loops[index] = loop if workers.world == 1 else loop.part(workers.rank, workers.world)
        return loops

    loops, outcome = project_end_to_end(context, make_loops, project)
    if not workers.leads:
        return outcome
    kept.mkdir(exist_ok=True)
    for (index, found), loop in zip(outcomes.items(), loops, strict=True):
        rounded = ProjectedLayer.of(loop, found, checkpoint.dtype, checkpoint.down_scale)
        save_layer_checkpoint(kept, index, rounded)
    save_layer_checkpoint(kept, depth, outcome)
    return outcome


def summarise(outcomes: Mapping[int, Outcome], notes: Sequence[str], project: ProjectConfig) -> Table:
    """One row per layer: relative error of the FFN's output on validation tokens after each step."""
    rows = [
        [
            layer,
            f"{outcome.error_start:.4f}",
            "-" if outcome.error_aligned is None else f"{outcome.error_aligned:.4f}",
            "-" if outcome.penalty is None else f"{outcome.penalty:g}",
            outcome.rounds,
            f"{outcome.error_end:.4f}",
        ]
        for layer, outcome in outcomes.items()
    ]
    last = "error after descent" if project.descent_steps else "error at the end"
    columns = ["layer", "error as cut", "after alignment", "ridge penalty", "router rounds", last]
    return Table("project", columns, rows, notes)


def describe(outcomes: Mapping[int, Outcome], project: ProjectConfig, gradients: ProjectionOutcome | None) -> str:
    """The projection in one sentence."""
    aligned = sum(outcome.penalty is not None for outcome in outcomes.values())
    alignment = f"ridge in {aligned} of {len(outcomes)} layers" if project.alignment == "ridge" else "off"
    rounds = sum(outcome.rounds for outcome in outcomes.values())
    said = [f"alignment {alignment}"]
    said += [f"{rounds} rounds of router and alignment kept"] if rounds else []
    if project.descent_steps:
        kept = sum(outcome.descended for outcome in outcomes.values())
        said += [f"{project.descent_steps} steps of layer-wise descent in {kept} of {len(outcomes)} layers"]
    return "; ".join([*said, describe_gradients(gradients)])


@torch.no_grad()
def run_pool(
    job: Job, context: CalibrationContext, checkpoint: CheckpointFormat, routers: Routers, project: ProjectConfig
) -> Table:
    """Write `checkpoint/` and the routers; `routers` are those of stage=assemble."""
    partition, workers = Partition.load(job.parents["cluster"]), job.workers
    with LayerStream(context.folder, device=context.device) as stream:
        samples, act = sample_layers(stream, context.batches, project.pool_tokens, workers, context.memory)
    loops: list[ExpertLoop] = []
    for layer, cut in enumerate(load_pool(job.parents["extract"], partition.layers, context.device)):
        loop = checkpoint.loop(partition, layer, cut, routers.layer(layer), act, context.device)
        loops += with_down([loop], (loops or [loop])[0].experts.down_EDN)  # on a GPU each has a copy of its own
    sources = text_sources(context.batches)
    refits = [
        refit_settings(checkpoint, project, routers.logit_std, layer_seed(context.seed, layer), sources)
        for layer in range(partition.layers)
    ]
    fit = PoolFit(samples, refits, project, workers)
    projected, outcome = fit.project(fit.weigh(loops))
    del fit, samples, loops, loop  # gradient projection needs their memory
    gradients = None
    if project.gradient_projection:
        parts = part_pool(projected, workers)
        projected, gradients = project_end_to_end(context, lambda _: parts, project)
    if not workers.leads:
        return NOTHING
    said, given = describe_pool(outcome, project, gradients), split_pool(projected, partition)
    fitted = {layer: loop.router for layer, loop in enumerate(projected)}
    experts = lambda layer: given[layer].to("cpu", checkpoint.dtype)  # noqa: E731
    checkpoint.write(job.out, fitted, routers.logit_std, experts, partition, said)
    return summarise_pool(outcome, said, partition)


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


def split_pool(loops: Sequence[ExpertLoop], partition: Partition) -> list[ExpertWeights]:
    """Every layer's own experts of the pool, and its always-on neurons."""
    ends = accumulate(partition.given)
    return [
        replace(loop.experts, **{name: getattr(loop.experts, name)[end - given : end] for name in ROUTED})
        for loop, given, end in zip(loops, partition.given, ends, strict=True)
    ]


STEPS = ("as cut", "after alignment", "at the end")


def summarise_pool(outcome: PoolOutcome, said: str, partition: Partition) -> Table:
    """One row per layer: relative error of the FFN's output on validation tokens after each step."""
    rows = [
        [layer, given, *(f"{outcome.errors[step][layer]:.4f}" if step in outcome.errors else "-" for step in STEPS)]
        for layer, given in enumerate(partition.given)
    ]
    columns = ["layer", "experts given", *(f"error {step}" for step in STEPS)]
    notes = [
        said,
        "all layers share the experts: errors are on the dense model's inputs; in the carved model they add up from "
        "layer to layer, and only stage=train corrects this",
    ]
    return Table("project", columns, rows, notes)


def describe_pool(outcome: PoolOutcome, project: ProjectConfig, gradients: ProjectionOutcome | None) -> str:
    """The projection in one sentence."""
    aligned = "off" if project.alignment == "none" else "dropped, since no penalty lowered the validation error"
    if outcome.penalty is not None:
        aligned = f"ridge, penalty {outcome.penalty:g}"
    said = [f"alignment {aligned}"]
    said += [f"{outcome.rounds} rounds of routers and alignment kept"] if outcome.rounds else []
    return "; ".join([*said, describe_gradients(gradients)])
