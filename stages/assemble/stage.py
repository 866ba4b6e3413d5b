"""assemble: fit a router per layer on the dense model's inputs, write experts and routers as a native checkpoint."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from models.config import ModelConfig, MoEShape
from models.experts import ExpertLoop, ExpertWeights
from models.ffn import DenseFFN
from models.loading import release_freed_memory
from models.routing import LOGIT_STD, GateKind, LinearRouter
from models.stream import LayerStream
from stages.artifacts.carve import Partition, PoolPartition, Routers, load_partition
from stages.artifacts.experts import CheckpointFormat, load_layer, load_pool
from stages.artifacts.job import Job, Table
from stages.artifacts.tensor_file import load_layer_checkpoint, save_layer_checkpoint
from stages.assemble.config import AssembleConfig
from stages.assemble.report import RouterReport, summarise, summarise_pool
from stages.calibration.alignment import column_scale, gate_moments, least_squares, scale_columns
from stages.calibration.batches import CalibrationContext, TokenStream, pick_tokens, take_tokens
from stages.calibration.config import VocabularyConfig
from stages.routing.descent import DescentSettings
from stages.routing.fit import RouterSettings, fit_pool_router, fit_router
from stages.routing.task import (
    RouterTask,
    load_balance,
    oracle_agreement,
    relative_output_error,
    set_logit_std,
    watch_experts,
    watch_pool,
)
from stages.text.config import DataConfig


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
    context = CalibrationContext.of(model, data, vocabulary, assemble.batch_tokens, seed)
    checkpoint = CheckpointFormat.of(context.folder, context.config, assemble, shape)
    partition = load_partition(job.parents["cluster"], shape)
    with LayerStream(context.folder, device=context.device) as stream:
        fit = (
            over_pool(job.parents["extract"], partition, checkpoint, assemble, context.device)
            if isinstance(partition, PoolPartition)
            else over_own(partition, checkpoint, assemble, context.device)
        )
        reports = fit_all(stream, context, fit, checkpoint, assemble, job.scratch)
    release_freed_memory()
    std = logit_std(assemble, checkpoint.gate)
    routers = Routers.of([report.router for report in reports], checkpoint.dtype, std)
    routers.save(job.out)
    scales, folder = column_scales(reports, assemble, partition), job.out / "checkpoint"
    checkpoint.write(folder, routers, lambda layer: scaled(load_layer(job.parents["extract"], layer), scales[layer]))
    checkpoint.write_card(folder, model, partition, "none: experts are the dense slices")
    if isinstance(partition, PoolPartition):
        return summarise_pool(reports, partition, shape)
    return summarise(reports, checkpoint.target, shape, partition, assemble)


def logit_std(assemble: AssembleConfig, gate: GateKind) -> float:
    """Standard deviation of a token's logits: next to nothing for constant gates, more for training."""
    if assemble.mode == "parity":
        return assemble.parity_logit_std
    return LOGIT_STD[gate] if assemble.logit_std is None else assemble.logit_std


class Fitted(NamedTuple):
    """One layer's router, what it was fitted on, and the dense FFN's outputs, a batch each."""

    task: RouterTask
    router: LinearRouter
    outputs: Sequence[Tensor]


# Layer, its FFN, the FFN's inputs, and a seed of its own → its router.
Fit = Callable[[int, DenseFFN, Sequence[Tensor], int], Fitted]


def over_own(partition: Partition, checkpoint: CheckpointFormat, assemble: AssembleConfig, device: torch.device) -> Fit:
    """Each layer chooses among its own experts."""
    top_k, biased = checkpoint.shape.top_k, checkpoint.biased

    def fit(layer: int, ffn: DenseFFN, inputs: Sequence[Tensor], seed: int) -> Fitted:
        neurons_EN, always_S = partition.neurons[layer].to(device), partition.always_on[layer].to(device)
        task, outputs = watch_experts(ffn, neurons_EN, always_S, inputs, top_k, biased=biased)
        return Fitted(task, fit_router(task, router_settings(assemble, seed, assemble.balance)), outputs)

    return fit


def over_pool(
    extracted: Path,
    partition: PoolPartition,
    checkpoint: CheckpointFormat,
    assemble: AssembleConfig,
    device: torch.device,
) -> Fit:
    """Each layer chooses among all experts, from any layer.

    No layer is to use all of them alike, so that nothing is paid for uneven load. The outputs of all experts are
    computed for `router_tokens` tokens alone: they cost E·N / F times the dense FFN.
    """
    pool, neurons_EN = load_pool(extracted, partition.layers, device), partition.neurons.to(device)
    top_k, biased = checkpoint.shape.top_k, checkpoint.biased

    def fit(layer: int, ffn: DenseFFN, inputs: Sequence[Tensor], seed: int) -> Fitted:
        outputs = [ffn(x_TD) for x_TD in inputs]
        unrouted = LinearRouter.without_bias(ffn.gate_FD.new_zeros(len(neurons_EN), ffn.gate_FD.shape[1]))
        always_S = partition.always_on[layer].to(device)
        loop = ExpertLoop(pool[layer], neurons_EN, always_S, unrouted, top_k, ffn.width, ffn.act)
        picks = pick_tokens([len(x_TD) for x_TD in inputs], assemble.router_tokens)
        seen, wanted = take_tokens(inputs, picks), take_tokens(outputs, picks)
        task = watch_pool(loop, lambda batch, _: wanted[batch], seen, biased=biased)
        return Fitted(task, fit_pool_router(task, router_settings(assemble, seed, balance=0.0)), outputs)

    return fit


def router_settings(assemble: AssembleConfig, seed: int, balance: float) -> RouterSettings:
    """What decides the router of one layer."""
    descent = DescentSettings(assemble.router_steps, assemble.router_rate, balance, seed)
    return RouterSettings(assemble.router, assemble.ridge_penalty, descent, assemble.router_tokens)


@torch.no_grad()
def fit_all(
    stream: LayerStream,
    context: CalibrationContext,
    fit: Fit,
    checkpoint: CheckpointFormat,
    assemble: AssembleConfig,
    scratch: Path,
) -> list[RouterReport]:
    """Pass the dense model's layers once, fitting each router on the inputs its FFN sees; each is kept in `scratch`."""
    tokens, text = TokenStream(stream, context.batches), len(context.text)
    reports = []
    for index, layer in enumerate(tqdm(stream.layers(), total=stream.depth, desc="assemble", unit="layer")):
        tokens.enter(layer)
        report = load_layer_checkpoint(scratch, index, RouterReport)
        outputs: Iterable[Tensor] = map(layer.ffn, tokens.inputs)
        if report is None:
            task, router, outputs = fit(index, layer.ffn, tokens.inputs, context.layer_seed(index))
            router = set_logit_std(router, tokens.inputs[:text], logit_std(assemble, checkpoint.gate))
            loop = replace(task.routed(router), gate=checkpoint.gate)
            scale_EN = scale_of(loop, tokens.inputs, assemble, pooled=checkpoint.shape.pooled)
            report = measure_router(loop, scale_EN, task, text)
            save_layer_checkpoint(scratch, index, report)
        reports.append(report)
        tokens.leave(outputs)
    return reports


def scale_of(loop: ExpertLoop, inputs: Sequence[Tensor], assemble: AssembleConfig, *, pooled: bool) -> Tensor:
    """(E, N) what the experts' down columns are multiplied by; 1 where gates are to count as constant."""
    if assemble.mode == "train":
        # Neurons of a pool are numbered by layer: equal numbers are no copies.
        return expand(least_squares(gate_moments(loop, inputs)), loop) if pooled else column_scale(loop, inputs)
    if loop.top_k == loop.router.experts and not pooled:
        return column_scale(replace(loop, gate=GateKind.CONSTANT), inputs)  # copies are all active together
    return expand(torch.ones(loop.router.experts, device=inputs[0].device), loop)


def expand(scale_E: Tensor, loop: ExpertLoop) -> Tensor:
    """One constant for all columns of an expert."""
    return scale_E[:, None].expand(loop.neurons_EN.shape)


def measure_router(loop: ExpertLoop, scale_EN: Tensor, task: RouterTask, text: int) -> RouterReport:
    """How a layer's router does on the calibration text, the first batches of the task."""
    moments_2E = gate_moments(loop, task.inputs)
    task = replace(task, inputs=task.inputs[:text], contributions=task.contributions[:text])
    return RouterReport(
        loop.router.to("cpu"),
        scale_EN.cpu(),
        moments_2E.cpu(),
        load_balance(loop.router, task.inputs, task.top_k).cpu(),
        oracle_agreement(loop.router, task),
        relative_output_error(scale_columns(loop, scale_EN), task),
    )


def column_scales(
    reports: Sequence[RouterReport], assemble: AssembleConfig, partition: Partition | PoolPartition
) -> Sequence[Tensor]:
    """Of every layer's own experts, the (E, N) scale of their down columns; a pool's is one for all its layers."""
    if isinstance(partition, Partition):
        return [report.scale_EN for report in reports]
    scale_EN = reports[0].scale_EN
    if assemble.mode == "train":
        moments_2E = torch.stack([report.moments_2E for report in reports]).sum(0)
        scale_EN = least_squares(moments_2E)[:, None].expand(partition.neurons.shape)
    return torch.split(scale_EN, partition.given)


def scaled(experts: ExpertWeights, scale_EN: Tensor) -> ExpertWeights:
    """The experts with their down columns multiplied, in fp32 where that changes anything."""
    if bool((scale_EN == 1).all()):
        return experts
    return replace(experts, down_EDN=experts.down_EDN.float() * scale_EN[:, None])
