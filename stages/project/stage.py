"""project: bend the experts towards the dense model, layer by layer, and write the router-ready checkpoint."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import repeat
from pathlib import Path

import torch
from tqdm import tqdm

from models.config import ModelConfig
from models.experts import LayerExperts
from models.families.fold import gate_kind
from models.families.moe import MOE_TARGETS
from models.ffn import ffn_modules
from models.gating import GateKind
from models.loading import load_dense, load_tokenizer, resolve_device
from models.routing import LinearRouter
from models.shape import Shape
from models.source import resolve_folder
from models.stream import LayerStream
from stages.calibration.batches import calibration_batches, text_only
from stages.calibration.card import write_carve_card
from stages.calibration.config import VocabularyConfig
from stages.calibration.emission import emit_carve
from stages.calibration.layer_seed import layer_seed
from stages.calibration.recomputation import save_memory
from stages.calibration.target import AlignmentTarget
from stages.calibration.token_stream import TokenStream
from stages.contracts.finished_layers import find_layer, keep_layer
from stages.contracts.job import Job, Table
from stages.contracts.partition import Partition
from stages.contracts.routers import Routers
from stages.data.batches import TokenBatch
from stages.data.config import DataConfig
from stages.project.config import ProjectConfig
from stages.project.layer import Outcome, project_layer
from stages.project.layer_carve import LayerCarve
from stages.project.mean_gradient import Gradients, mean_gradients
from stages.project.pool_stage import run_pool
from stages.project.projected_layer import ProjectedLayer
from stages.project.report import describe, summarise
from stages.routing.descent import DescentSettings
from stages.routing.fit import RouterSettings


def run(
    job: Job,
    *,
    model: ModelConfig,
    data: DataConfig,
    vocabulary: VocabularyConfig,
    project: ProjectConfig,
    shape: Shape,
    seed: int,
) -> Table:
    """Write `checkpoint/`; every step is judged on held-out calibration tokens."""
    folder = resolve_folder(model)
    routers = Routers.load(job.parents["assemble"])
    batches = calibration_batches(data, vocabulary, load_tokenizer(folder), project.batch_tokens)
    text = text_only(batches)
    gradients = gradients_of(model, folder, text, project)
    if shape.pooled:
        refit = [refit_settings(routers, project, layer_seed(seed, layer)) for layer in range(len(routers.rows))]
        asked = gradients if project.gradient_projection else None
        return run_pool(job, folder, batches, asked, refit, model=model, project=project, shape=shape, seed=seed)
    partition = Partition.load(job.parents["cluster"])
    with LayerStream(folder, device=resolve_device(model)) as stream:
        layers = project_all(stream, batches, partition, routers, gradients, project, shape, job.scratch, seed)
    outcomes = [outcome for _, outcome in layers]
    routers = routers.with_layers([router for router, _ in layers])
    routers.save(job.out)
    checkpoint = job.out / "checkpoint"
    emit_carve(folder, checkpoint, shape, routers, lambda layer: projected_experts(job.scratch, layer))
    write_carve_card(checkpoint, model, shape, partition, routers, describe(outcomes, project))
    tokens = sum(batch.tokens for batch in text)
    return summarise(outcomes, project, shape, partition.width, tokens, data.tokens)


def gradients_of(
    model: ModelConfig, folder: Path, batches: list[TokenBatch], project: ProjectConfig
) -> Iterator[Gradients]:
    """The dense model's mean gradients, layer by layer; nothing without gradient projection."""
    if not project.gradient_projection:
        return repeat({})
    wanted, chosen = project.gradient_tokens, []
    for batch in batches:
        if wanted <= 0:
            break
        chosen.append(batch)
        wanted -= batch.tokens
    # The experts are cut from the stored weights, whatever the scan computed with: they get those weights' gradients.
    dense = load_dense(replace(model, quantization="none"), folder)
    save_memory(dense, asked=False)
    return mean_gradients(dense, ffn_modules(dense), chosen, project.matrices, memory=project.gradient_memory)


@torch.no_grad()
def project_all(
    stream: LayerStream,
    batches: list[TokenBatch],
    partition: Partition,
    routers: Routers,
    gradients: Iterator[Gradients],
    project: ProjectConfig,
    shape: Shape,
    scratch: Path,
    seed: int,
) -> list[tuple[LinearRouter, Outcome]]:
    """Layers in order, each on the inputs that the layers before it give once carved; each is kept in `scratch`."""
    tokens, text = TokenStream(stream, batches), len(text_only(batches))
    target = AlignmentTarget(project.alignment_target, stream, batches)
    dtype: torch.dtype = getattr(torch, routers.dtype)
    found = []
    for index, layer in enumerate(tqdm(stream.layers(), total=stream.depth, desc="project", unit="layer")):
        tokens.enter(layer)
        target.enter(layer, tokens)
        carve = LayerCarve(
            layer.ffn,
            partition.units[index].to(stream.device),
            partition.always_on[index].to(stream.device),
            routers.layer(index).to(stream.device),
            shape,
            refit_settings(routers, project, layer_seed(seed, index)),
            routers.spread,
            routers.biased,
            GateKind(gate_kind(MOE_TARGETS[routers.target], shape)),
            text,
        )
        gradient = {name: matrix.to(stream.device) for name, matrix in next(gradients).items()}
        done = find_layer(scratch, index, ProjectedLayer)
        if done is None:
            loop, outcome = project_layer(carve, tokens.inputs, target, gradient, project, layer_seed(seed, index))
            done = ProjectedLayer.of(loop, outcome, dtype)
            keep_layer(scratch, index, done)
        # The layers to come see what the checkpoint will compute, rounded as it is there.
        tokens.leave(map(done.loop(carve), tokens.inputs))
        found.append((done.router, done.outcome))
    return found


def projected_experts(scratch: Path, layer: int) -> LayerExperts:
    """The experts of a layer that is done."""
    done = find_layer(scratch, layer, ProjectedLayer)
    assert done is not None, "project_all keeps every layer"
    return done.experts


def refit_settings(routers: Routers, project: ProjectConfig, seed: int) -> RouterSettings:
    """How a layer's router is fitted anew: as it was made, with this stage's patience."""
    descent = DescentSettings(project.router_steps, project.router_rate, routers.balance, seed)
    return RouterSettings(routers.method, routers.ridge_penalty, descent, project.router_tokens, project.guard_share)
