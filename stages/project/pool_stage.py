"""project for a global pool: sample the dense model once, bend the pool, write the router-ready checkpoint."""

from dataclasses import fields
from pathlib import Path

import torch

from models.config import ModelConfig
from models.expert_loop import ExpertLoop
from models.experts import LayerExperts
from models.loading import resolve_device
from models.shape import Shape
from models.stream import LayerStream
from stages.calibration.batches import text_only
from stages.calibration.card import write_carve_card
from stages.calibration.emission import emit_carve
from stages.calibration.layer_samples import sample_layers
from stages.calibration.layer_seed import layer_seed
from stages.calibration.pool import cut_pool, join_pool
from stages.contracts.job import Job, Table
from stages.contracts.pool_partition import PoolPartition
from stages.contracts.routers import Routers
from stages.data.batches import TokenBatch
from stages.project.config import ProjectConfig
from stages.project.end_to_end import project_end_to_end
from stages.project.layer_pass import gate_of
from stages.project.pool import PoolCarve, project_pool, split_pool, start_pool, weigh_pool
from stages.project.pool_report import describe_pool, summarise_pool
from stages.routing.fit import RouterSettings


@torch.no_grad()
def run_pool(
    job: Job,
    folder: Path,
    batches: list[TokenBatch],
    refit: list[RouterSettings],
    *,
    model: ModelConfig,
    project: ProjectConfig,
    shape: Shape,
    seed: int,
) -> Table:
    """Write `checkpoint/` and the routers.

    Args:
        job: of the stage.
        folder: the dense checkpoint.
        batches: calibration text.
        refit: how each layer's router is fitted anew.
        model: the source.
        project: settings of the stage.
        shape: of the pool.
        seed: of the run.
    """
    partition, routers = PoolPartition.load(job.parents["cluster"]), Routers.load(job.parents["assemble"])
    with LayerStream(folder, device=resolve_device(model)) as stream:
        samples = sample_layers(stream, batches, project.pool_tokens)
    seeds = [layer_seed(seed, layer) for layer in range(partition.layers)]
    parts = start_pool(cut_pool(folder, partition, stream.device), project.base, seeds)
    loops = [
        ExpertLoop(
            experts,
            partition.units.to(stream.device),
            partition.always_on[layer].to(stream.device),
            routers.layer(layer).to(stream.device),
            shape.top_k,
            partition.width,
            samples[layer].act,
            gate_of(routers, shape),
        )
        for layer, experts in enumerate(join_pool(parts))
    ]
    carve = PoolCarve(partition, samples, refit, routers.spread, routers.biased)
    aligned, outcome = project_pool(carve, weigh_pool(loops, samples), project)
    projected, gradients = aligned, None
    if project.gradient_projection:
        projected, gradients = project_end_to_end(model, folder, text_only(batches), lambda _: aligned, project, seed)
    routers = routers.with_layers([loop.router for loop in projected])
    routers.save(job.out)
    checkpoint = job.out / "checkpoint"
    given, dtype = split_pool(projected, partition), getattr(torch, routers.dtype)
    emit_carve(folder, checkpoint, shape, routers, lambda layer: in_dtype(given[layer], dtype))
    write_carve_card(checkpoint, model, shape, partition, routers, describe_pool(outcome, project, gradients))
    return summarise_pool(outcome, project, gradients, partition)


def in_dtype(experts: LayerExperts, dtype: torch.dtype) -> LayerExperts:
    """The same on the CPU in the checkpoint's number format."""
    return LayerExperts(**{spec.name: getattr(experts, spec.name).to("cpu", dtype) for spec in fields(experts)})
