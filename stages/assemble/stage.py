"""assemble: fit a router per layer on the dense model's inputs, write experts and routers as a native checkpoint."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from models.config import ModelConfig, MoEShape
from models.emit import checkpoint_dtype
from models.experts import ExpertLoop, LayerExperts
from models.loading import load_tokenizer, release_freed_memory, resolve_device
from models.routing import LOGIT_STD, GateKind
from models.source import read_config, resolve_folder
from models.stream import LayerStream
from models.targets.base import gate_kind
from models.targets.choose import select_target
from stages.artifacts.experts import load_layer
from stages.artifacts.job import Job, Table
from stages.artifacts.partition import Partition, PoolPartition, load_partition
from stages.artifacts.routers import Routers
from stages.artifacts.tensor_file import load_layer_checkpoint, save_layer_checkpoint
from stages.assemble.config import AssembleConfig
from stages.assemble.fitting import Fit, over_own, over_pool
from stages.assemble.report import RouterReport, summarise, summarise_pool
from stages.calibration.batches import calibration_batches, layer_seed, text_only
from stages.calibration.config import VocabularyConfig
from stages.calibration.emission import emit_carve, write_carve_card
from stages.calibration.gate_scale import column_scale, gate_moments, least_squares, scale_columns
from stages.calibration.token_stream import TokenStream
from stages.routing.task import RouterTask, load_balance, oracle_agreement, relative_output_error, set_logit_std
from stages.text.config import DataConfig
from stages.text.sequences import TokenBatch


def run(
    job: Job,
    *,
    model: ModelConfig,
    data: DataConfig,
    vocabulary: VocabularyConfig,
    assemble: AssembleConfig,
    shape: MoEShape,
    seed: int,
) -> Table:
    """Write `checkpoint/` and the routers."""
    folder = resolve_folder(model)
    source = read_config(folder)
    target = select_target(source["model_type"], assemble.target, shape.always_on, pooled=shape.pooled)
    partition = load_partition(job.parents["cluster"], shape)
    batches = calibration_batches(data, vocabulary, load_tokenizer(folder), assemble.batch_tokens)
    biased = target.selection_bias is not None and assemble.mode == "parity"
    gate = GateKind(gate_kind(target, shape))
    with LayerStream(folder, device=resolve_device(model)) as stream:
        fit = (
            over_pool(folder, partition, assemble, shape, stream.device, biased=biased)
            if isinstance(partition, PoolPartition)
            else over_own(partition, assemble, shape, stream.device, biased=biased)
        )
        reports = fit_all(stream, batches, fit, assemble, shape, gate, seed, job.scratch)
    release_freed_memory()
    dtype = checkpoint_dtype(folder, assemble.dtype)
    routers = Routers(
        assemble.router,
        target.model_type,
        assemble.dtype,
        str(dtype).removeprefix("torch."),
        assemble.ridge_penalty,
        assemble.load_price(pooled=shape.pooled),
        logit_std(assemble, gate),
        biased,
        assemble.pad_to,
        rows=torch.empty(0),
        bias=torch.empty(0),
    ).with_layers([report.router for report in reports])
    routers.save(job.out)
    checkpoint = emit(job, folder, shape, partition, routers, column_scales(reports, assemble, shape))
    write_carve_card(checkpoint, model, shape, partition, routers, "none: experts are the dense slices")
    if isinstance(partition, PoolPartition):
        return summarise_pool(reports, partition, shape)
    return summarise(reports, target, shape, partition, assemble)


def logit_std(assemble: AssembleConfig, gate: GateKind) -> float:
    """Standard deviation of a token's logits: next to nothing for constant gates, more for training."""
    if assemble.mode == "parity":
        return assemble.parity_logit_std
    return LOGIT_STD[gate] if assemble.logit_std is None else assemble.logit_std


@torch.no_grad()
def fit_all(
    stream: LayerStream,
    batches: list[TokenBatch],
    fit: Fit,
    assemble: AssembleConfig,
    shape: MoEShape,
    gate: GateKind,
    seed: int,
    scratch: Path,
) -> list[RouterReport]:
    """Pass the dense model's layers once, fitting each router on the inputs its FFN sees; each is kept in `scratch`."""
    tokens, text = TokenStream(stream, batches), len(text_only(batches))
    reports = []
    for index, layer in enumerate(tqdm(stream.layers(), total=stream.depth, desc="assemble", unit="layer")):
        tokens.enter(layer)
        report = load_layer_checkpoint(scratch, index, RouterReport)
        outputs: Iterable[Tensor] = map(layer.ffn, tokens.inputs)
        if report is None:
            task, router, outputs = fit(index, layer.ffn, tokens.inputs, layer_seed(seed, index))
            router = set_logit_std(router, tokens.inputs[:text], logit_std(assemble, gate))
            loop = replace(task.routed(router), gate=gate)
            report = measure_router(loop, scale_of(loop, tokens.inputs, assemble, shape), task, text)
            save_layer_checkpoint(scratch, index, report)
        reports.append(report)
        tokens.leave(outputs)
    return reports


def scale_of(loop: ExpertLoop, inputs: Sequence[Tensor], assemble: AssembleConfig, shape: MoEShape) -> Tensor:
    """(E, N) what the experts' down columns are multiplied by; 1 where gates are to count as constant."""
    if assemble.mode == "train":
        # Neurons of a pool are numbered by layer: equal numbers are no copies.
        return expand(least_squares(gate_moments(loop, inputs)), shape) if shape.pooled else column_scale(loop, inputs)
    if shape.top_k == shape.experts and not shape.pooled:
        return column_scale(replace(loop, gate=GateKind.CONSTANT), inputs)  # copies are all active together
    return expand(torch.ones(shape.experts, device=inputs[0].device), shape)


def expand(scale_E: Tensor, shape: MoEShape) -> Tensor:
    """One constant for all columns of an expert."""
    return scale_E[:, None].expand(-1, shape.n)


def measure_router(loop: ExpertLoop, scale_EN: Tensor, task: RouterTask, text: int) -> RouterReport:
    """How a layer's router does on the calibration text, the first batches of the task."""
    moments_2E = gate_moments(loop, task.inputs)
    task = replace(task, inputs=task.inputs[:text], contributions=task.contributions[:text])
    load_E, agreement = load_balance(loop.router, task.inputs, task.top_k), oracle_agreement(loop.router, task)
    error, kept = relative_output_error(scale_columns(loop, scale_EN), task), loop.router.to("cpu")
    scale_EN = scale_EN.cpu().contiguous()
    return RouterReport(kept.rows_ED, kept.bias_E, scale_EN, moments_2E.cpu(), load_E.cpu(), agreement, error)


def column_scales(reports: Sequence[RouterReport], assemble: AssembleConfig, shape: MoEShape) -> list[Tensor]:
    """Each layer's (E, N) scale of the down columns; of a pool, one for all its layers."""
    if not shape.pooled or assemble.mode == "parity":
        return [report.scale_EN for report in reports]
    moments_2E = torch.stack([report.moments_2E for report in reports]).sum(0)
    return [expand(least_squares(moments_2E), shape)]


def emit(
    job: Job,
    folder: Path,
    shape: MoEShape,
    partition: Partition | PoolPartition,
    routers: Routers,
    scales: Sequence[Tensor],
) -> Path:
    """Write the checkpoint from the extracted experts, a layer at a time."""
    parts = scales
    if isinstance(partition, PoolPartition):  # a layer gives the experts that were cut from it
        parts = torch.split(scales[0], partition.given)

    def experts(layer: int) -> LayerExperts:
        slices, scale_EN = load_layer(job.parents["extract"], layer), parts[layer]
        if bool((scale_EN == 1).all()):
            return slices
        return replace(slices, down_EDN=slices.down_EDN.float() * scale_EN[:, None].to(slices.down_EDN.device))

    checkpoint = job.out / "checkpoint"
    emit_carve(folder, checkpoint, shape, routers, experts)
    return checkpoint
