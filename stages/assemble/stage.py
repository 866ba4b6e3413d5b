"""assemble: fit a router per layer on the dense model's inputs, write experts and routers as a native checkpoint."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from models.config import ModelConfig
from models.experts import LayerExperts
from models.families.emit import checkpoint_dtype
from models.families.target_choice import select_target
from models.loading import load_tokenizer, resolve_device
from models.memory import release_freed_memory
from models.routing import LinearRouter
from models.shape import Shape
from models.source import read_config, resolve_folder
from models.stream import LayerStream
from stages.assemble.config import AssembleConfig
from stages.assemble.fitting import Fit, over_own, over_pool
from stages.assemble.pool_report import summarise_pool
from stages.assemble.replicas import divide_by_multiplicity
from stages.assemble.report import RouterReport, summarise
from stages.calibration.batches import calibration_batches, text_only
from stages.calibration.card import write_carve_card
from stages.calibration.config import VocabularyConfig
from stages.calibration.emission import emit_carve
from stages.calibration.layer_seed import layer_seed
from stages.calibration.token_stream import TokenStream
from stages.contracts.experts import load_layer
from stages.contracts.finished_layers import find_layer, keep_layer
from stages.contracts.job import Job, Table
from stages.contracts.partition import Partition
from stages.contracts.pool_partition import PoolPartition, load_partition
from stages.contracts.routers import Routers
from stages.data.batches import TokenBatch
from stages.data.config import DataConfig
from stages.routing.measure import load_balance, oracle_agreement, relative_output_error, set_spread
from stages.routing.task import RouterTask


def run(
    job: Job,
    *,
    model: ModelConfig,
    data: DataConfig,
    vocabulary: VocabularyConfig,
    assemble: AssembleConfig,
    shape: Shape,
    seed: int,
) -> Table:
    """Write `checkpoint/` and the routers."""
    folder = resolve_folder(model)
    source = read_config(folder)
    target = select_target(source["model_type"], assemble.target, shape.always_on, pooled=shape.pooled)
    partition = load_partition(job.parents["cluster"], shape)
    batches = calibration_batches(data, vocabulary, load_tokenizer(folder), assemble.batch_tokens)
    biased = target.selection_bias is not None and assemble.mode == "parity"
    with LayerStream(folder, device=resolve_device(model)) as stream:
        fit = (
            over_pool(folder, partition, assemble, shape, stream.device, biased=biased)
            if isinstance(partition, PoolPartition)
            else over_own(partition, assemble, shape, stream.device, biased=biased)
        )
        reports = fit_all(stream, batches, fit, assemble, shape, seed, job.scratch)
    release_freed_memory()
    dtype = checkpoint_dtype(folder, assemble.dtype)
    routers = Routers(
        assemble.router,
        target.model_type,
        assemble.dtype,
        str(dtype).removeprefix("torch."),
        assemble.ridge_penalty,
        assemble.load_price(pooled=shape.pooled),
        router_spread(assemble),
        biased,
        assemble.pad_to,
        rows=torch.empty(0),
        bias=torch.empty(0),
    ).with_layers([report.router for report in reports])
    routers.save(job.out)
    checkpoint = emit(job, folder, shape, partition, routers)
    write_carve_card(checkpoint, model, shape, partition, routers, "none: experts are the dense slices")
    if isinstance(partition, PoolPartition):
        return summarise_pool(reports, partition, shape)
    return summarise(reports, target, shape, partition, assemble)


def router_spread(assemble: AssembleConfig) -> float:
    """Standard deviation of a token's logits: next to nothing for constant gates, 1 for training."""
    return assemble.parity_spread if assemble.mode == "parity" else 1.0


@torch.no_grad()
def fit_all(
    stream: LayerStream,
    batches: list[TokenBatch],
    fit: Fit,
    assemble: AssembleConfig,
    shape: Shape,
    seed: int,
    scratch: Path,
) -> list[RouterReport]:
    """Pass the dense model's layers once, fitting each router on the inputs its FFN sees; each is kept in `scratch`."""
    tokens, text = TokenStream(stream, batches), len(text_only(batches))
    reports = []
    for index, layer in enumerate(tqdm(stream.layers(), total=stream.depth, desc="assemble", unit="layer")):
        tokens.enter(layer)
        report = find_layer(scratch, index, RouterReport)
        outputs: Iterable[Tensor] = map(layer.ffn, tokens.inputs)
        if report is None:
            task, router, outputs = fit(index, layer.ffn, tokens.inputs, layer_seed(seed, index))
            router = set_spread(router, tokens.inputs[:text], router_spread(assemble))
            report = measure_router(router, task, text)
            keep_layer(scratch, index, report)
        reports.append(report)
        tokens.leave(outputs)
    return reports


def measure_router(router: LinearRouter, task: RouterTask, text: int) -> RouterReport:
    """How a layer's router does on the calibration text, the first batches of the task."""
    task = replace(task, inputs=task.inputs[:text], contributions=task.contributions[:text])
    load_E, agreement = load_balance(router, task.inputs, task.top_k), oracle_agreement(router, task)
    error, kept = relative_output_error(router, task), router.to("cpu")
    return RouterReport(kept.rows_ED, kept.bias_E, load_E.cpu(), agreement, error)


def emit(job: Job, folder: Path, shape: Shape, partition: Partition | PoolPartition, routers: Routers) -> Path:
    """Write the checkpoint from the extracted experts, a layer at a time."""
    multiplicity_LF = partition.multiplicity

    def experts(layer: int) -> LayerExperts:
        slices = load_layer(job.parents["extract"], layer)
        if shape.pooled or shape.top_k < shape.experts:
            return slices
        return divide_by_multiplicity(slices, partition.units_of(layer), multiplicity_LF[layer])

    checkpoint = job.out / "checkpoint"
    emit_carve(folder, checkpoint, shape, routers, experts)
    return checkpoint
