"""project: bend the experts towards the dense model, layer by layer, and write the router-ready checkpoint."""

from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from models.config import ModelConfig
from models.families.fold import gate_fold, gate_kind
from models.families.moe import MOE_TARGETS
from models.ffn import ffn_modules
from models.gating import GateKind
from models.loading import load_dense, load_tokenizer, resolve_device
from models.memory import release_freed_memory
from models.placement import execution_device
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
from stages.project.carved_model import CarvedModel
from stages.project.config import ProjectConfig
from stages.project.gradient_rounds import GRADIENT_SEED, GradientRounds, ProjectionOutcome
from stages.project.layer import Outcome, project_layer
from stages.project.layer_carve import LayerCarve
from stages.project.pool_stage import run_pool
from stages.project.projected_layer import ProjectedLayer
from stages.project.report import describe, summarise
from stages.routing.descent import DescentSettings
from stages.routing.fit import RouterSettings

FINAL = "projected"  # folder in the scratch of the layers after gradient projection


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
    if shape.pooled:
        refit = [refit_settings(routers, project, layer_seed(seed, layer)) for layer in range(len(routers.rows))]
        return run_pool(job, folder, batches, refit, model=model, project=project, shape=shape, seed=seed)
    partition = Partition.load(job.parents["cluster"])
    with LayerStream(folder, device=resolve_device(model)) as stream:
        layers = project_all(stream, batches, partition, routers, project, shape, job.scratch, seed)
    outcomes = [outcome for _, outcome in layers]
    routers = routers.with_layers([router for router, _ in layers])
    final, gradients = job.scratch, None
    if project.gradient_projection:
        gradients = project_end_to_end(
            model, folder, text, partition, routers, project, shape, job.scratch, layer_seed(seed, GRADIENT_SEED)
        )
        final = job.scratch / FINAL
    release_freed_memory()
    routers.save(job.out)
    checkpoint = job.out / "checkpoint"
    emit_carve(folder, checkpoint, shape, routers, lambda layer: find_done(final, layer).experts)
    write_carve_card(checkpoint, model, shape, partition, routers, describe(outcomes, project, gradients))
    tokens = sum(batch.tokens for batch in text)
    return summarise(outcomes, project, gradients, shape, partition.width, tokens, data.tokens)


def project_end_to_end(
    model: ModelConfig,
    folder: Path,
    text: list[TokenBatch],
    partition: Partition,
    routers: Routers,
    project: ProjectConfig,
    shape: Shape,
    scratch: Path,
    seed: int,
) -> ProjectionOutcome:
    """Rounds of gradient projection over all layers; the projected ones are kept in `scratch / FINAL`."""
    kept, depth = scratch / FINAL, partition.layers
    if (outcome := find_layer(kept, depth, ProjectionOutcome)) is not None:
        return outcome
    # The experts are cut from the stored weights, whatever the scan computed with: so is the model that teaches them.
    dense = load_dense(replace(model, quantization="none"), folder)
    save_memory(dense, asked=False)
    layers = [find_done(scratch, layer) for layer in range(depth)]
    loops = [
        layer.loop(
            partition.units[index],
            partition.always_on[index],
            mlp.act_fn,
            top_k=shape.top_k,
            width=partition.width,
            gate=gate_of(routers, shape),
            device=execution_device(mlp.gate_proj),
        )
        for index, (layer, mlp) in enumerate(zip(layers, ffn_modules(dense), strict=True))
    ]
    carved = CarvedModel(dense, loops)
    outcome = GradientRounds(carved, text, project, seed).run()
    dtype: torch.dtype = getattr(torch, routers.dtype)
    fold = gate_fold(MOE_TARGETS[routers.target], shape)
    kept.mkdir(exist_ok=True)
    for index, (layer, loop) in enumerate(zip(layers, carved.loops, strict=True)):
        keep_layer(kept, index, ProjectedLayer.of(loop, layer.outcome, dtype, fold.down_scale))
    keep_layer(kept, depth, outcome)
    return outcome


def gate_of(routers: Routers, shape: Shape) -> GateKind:
    """How the target turns logits into gates."""
    return GateKind(gate_kind(MOE_TARGETS[routers.target], shape))


@torch.no_grad()
def project_all(
    stream: LayerStream,
    batches: list[TokenBatch],
    partition: Partition,
    routers: Routers,
    project: ProjectConfig,
    shape: Shape,
    scratch: Path,
    seed: int,
) -> list[tuple[LinearRouter, Outcome]]:
    """Layers in order, each on the inputs that the layers before it give once carved; each is kept in `scratch`."""
    tokens, text = TokenStream(stream, batches), len(text_only(batches))
    target = AlignmentTarget(project.alignment_target, stream, batches)
    dtype: torch.dtype = getattr(torch, routers.dtype)
    fold = gate_fold(MOE_TARGETS[routers.target], shape)
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
            gate_of(routers, shape),
            text,
        )
        done = find_layer(scratch, index, ProjectedLayer)
        if done is None:
            loop, outcome = project_layer(carve, tokens.inputs, target, project, layer_seed(seed, index))
            done = ProjectedLayer.of(loop, outcome, dtype, fold.down_scale)
            keep_layer(scratch, index, done)
        # The layers to come see what the checkpoint will compute, rounded as it is there.
        loop = done.loop(
            carve.units_EN,
            carve.always_S,
            layer.ffn.act,
            top_k=shape.top_k,
            width=partition.width,
            gate=carve.gate,
            device=stream.device,
        )
        tokens.leave(map(loop, tokens.inputs))
        found.append((done.router, done.outcome))
    return found


def find_done(scratch: Path, layer: int) -> ProjectedLayer:
    """A layer that is done."""
    done = find_layer(scratch, layer, ProjectedLayer)
    assert done is not None, "every layer is kept"
    return done


def refit_settings(routers: Routers, project: ProjectConfig, seed: int) -> RouterSettings:
    """How a layer's router is fitted anew: as it was made, with this stage's patience."""
    descent = DescentSettings(project.router_steps, project.router_rate, routers.balance, seed)
    return RouterSettings(
        routers.method, routers.ridge_penalty, descent, project.router_tokens, project.guard_share, routers.spread
    )
