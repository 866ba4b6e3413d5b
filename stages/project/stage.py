"""project: bend the experts towards the dense model, layer by layer, and write the router-ready checkpoint."""

from models.config import ModelConfig, MoEShape
from models.loading import load_tokenizer, release_freed_memory, resolve_device
from models.source import resolve_folder
from models.stream import LayerStream
from stages.artifacts.job import Job, Table
from stages.artifacts.partition import Partition
from stages.artifacts.routers import Routers
from stages.calibration.batches import calibration_batches, layer_seed, text_only
from stages.calibration.config import VocabularyConfig
from stages.calibration.emission import emit_carve, write_carve_card
from stages.project.config import ProjectConfig
from stages.project.end_to_end import project_layers
from stages.project.layer_pass import find_done, project_all, refit_settings
from stages.project.pool import run_pool
from stages.project.report import describe, summarise
from stages.text.config import DataConfig


def run(
    job: Job,
    *,
    model: ModelConfig,
    data: DataConfig,
    vocabulary: VocabularyConfig,
    project: ProjectConfig,
    shape: MoEShape,
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
        final = job.scratch / "projected"
        gradients = project_layers(
            model, folder, text, partition, routers, project, shape, aligned=job.scratch, kept=final, seed=seed
        )
    release_freed_memory()
    routers.save(job.out)
    checkpoint = job.out / "checkpoint"
    emit_carve(folder, checkpoint, shape, routers, lambda layer: find_done(final, layer).experts)
    write_carve_card(checkpoint, model, shape, partition, routers, describe(outcomes, project, gradients))
    tokens = sum(batch.tokens for batch in text)
    return summarise(outcomes, project, gradients, shape, partition.width, tokens, data.tokens)
