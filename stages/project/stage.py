"""project: fit the experts to the dense model, layer by layer, and write the router-ready checkpoint."""

from models.config import ModelConfig, MoEShape
from models.loading import release_freed_memory
from models.stream import LayerStream
from stages.artifacts.carve import Partition, Routers
from stages.artifacts.experts import CheckpointFormat, FormatSettings
from stages.artifacts.job import Job, Table
from stages.calibration.batches import CalibrationContext
from stages.calibration.config import VocabularyConfig
from stages.project.config import ProjectConfig
from stages.project.gradient_projection import project_layers
from stages.project.layer_pass import find_done, project_all
from stages.project.pool import run_pool
from stages.project.report import describe, summarise
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
    """Write `checkpoint/` and the routers; every step is judged on validation tokens."""
    context = CalibrationContext.of(model, data, vocabulary, project.batch_tokens, seed)
    checkpoint = CheckpointFormat.of(context.folder, context.config, assemble, shape)
    routers = Routers.load(job.parents["assemble"])
    if shape.pooled:
        return run_pool(job, context, checkpoint, routers, project)
    partition, extracted = Partition.load(job.parents["cluster"]), job.parents["extract"]
    with LayerStream(context.folder, device=context.device) as stream:
        layers = project_all(stream, context, checkpoint, extracted, partition, routers, project, job.scratch)
    outcomes = [outcome for _, outcome in layers]
    final, gradients = job.scratch, None
    if project.gradient_projection:
        final = job.scratch / "projected"
        gradients = project_layers(
            model, context.folder, context.text, partition, checkpoint, project,
            aligned=job.scratch, kept=final, seed=seed,
        )  # fmt: skip
    release_freed_memory()
    routers = Routers.of([router for router, _ in layers], checkpoint.dtype, routers.logit_std)
    routers.save(job.out)
    folder = job.out / "checkpoint"
    checkpoint.write(folder, routers, lambda layer: find_done(final, layer).experts)
    checkpoint.write_card(folder, model, partition, describe(outcomes, project, gradients))
    tokens = sum(batch.tokens for batch in context.text)
    return summarise(outcomes, project, gradients, shape, partition.width, tokens, data.tokens)
