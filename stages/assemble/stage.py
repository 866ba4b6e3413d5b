"""assemble: fit a router per layer on the dense model's inputs, write experts and routers as a native checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor
from tqdm import tqdm

from models.config import ModelConfig, MoEShape
from models.experts import ExpertWeights
from models.loading import release_freed_memory
from models.routing import LOGIT_STD, GateKind, LinearRouter
from models.stream import LayerStream
from stages.artifacts.carve import Partition
from stages.artifacts.experts import CheckpointFormat, load_layer, load_pool
from stages.artifacts.job import NOTHING, Job, Table
from stages.artifacts.tensor_file import load_layer_checkpoint, save_layer_checkpoint
from stages.assemble.config import AssembleConfig
from stages.calibration.alignment import column_scale, gate_moments, least_squares
from stages.calibration.batches import CalibrationContext, DealtLayer, deal_layers, layer_seed, text_sources
from stages.calibration.config import VocabularyConfig
from stages.calibration.number_format import check_number_format
from stages.calibration.share import take_tokens
from stages.routing.descent import RouterSettings
from stages.routing.fit import fit_pool_router, fit_router
from stages.routing.task import RouterTask, load_balance, make_loop, set_logit_std, watch_experts, watch_pool
from stages.text.config import DataConfig


@dataclass(frozen=True)
class RouterReport:
    """One layer's router and how it routes the calibration text, on the CPU."""

    router: LinearRouter
    scale_EN: Tensor  # of the experts' down columns, compensates for gates and copies
    moments_2E: Tensor  # Σ g and Σ g² of every expert's gates
    load_E: Tensor  # 1 = even share
    silent: bool = False  # the dense FFN writes nothing on the text: there is nothing to choose


def summarise(
    reports: Mapping[int, RouterReport], checkpoint: CheckpointFormat, partition: Partition, assemble: AssembleConfig
) -> Table:
    """One row per carved layer."""
    rows = [[layer, f"{one.load_E.max():.2f}", int((one.load_E == 0).sum())] for layer, one in reports.items()]
    shape = checkpoint.shape
    share = shape.active_width / partition.width
    notes = [
        f"{checkpoint.target.architecture}: {shape.experts} experts of {shape.n}, {shape.top_k} per token, "
        f"{shape.always_on} always on ({share:.0%} of the dense FFN's {partition.width} neurons)"
    ]
    if silent := ",".join(str(layer) for layer, report in reports.items() if report.silent):
        notes.append(f"the dense FFN of layer {silent} writes nothing on the text; 'dense_layers=[{silent}]' keeps it")
    unused = sum(int((report.load_E == 0).sum()) for report in reports.values() if not report.silent)
    if unused and not shape.pooled:  # no layer of a pool should use all experts
        price, steps = 10 * assemble.balance or 0.1, max(200, assemble.router_steps)
        remedy = f"assemble.router=error assemble.router_steps={steps} assemble.balance={price:g} evens the load"
        notes.append(f"{unused} experts are chosen by no calibration token; {remedy}")
    return Table("assemble", ["layer", "load max/mean", "unused experts"], rows, notes)


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
    context = CalibrationContext.of(model, data, vocabulary, seed, job)
    checkpoint = CheckpointFormat.of(context.model, context.folder, assemble, shape)
    partition = Partition.load(job.parents["cluster"])
    pool = load_pool(job.parents["extract"], partition.layers, context.device) if shape.pooled else None
    with LayerStream(context.folder, device=context.device) as stream:
        reports = fit_all(stream, context, checkpoint, partition, pool, assemble, job.scratch)
    release_freed_memory()
    if not job.workers.leads:
        return NOTHING
    scales = column_scales(reports, partition)
    checkpoint.write(
        job.out,
        {layer: report.router for layer, report in reports.items()},
        logit_std(assemble, checkpoint.gate),
        lambda layer: scaled(load_layer(job.parents["extract"], layer), scales[layer]),
        partition,
        projection="none: experts are the dense slices",
    )
    check_number_format(job.out / "checkpoint", checkpoint.dtype, context.text, context.model, job.scratch)
    return summarise(reports, checkpoint, partition, assemble)


def logit_std(assemble: AssembleConfig, gate: GateKind) -> float:
    """Standard deviation of a token's logits; 0: constant gates."""
    return LOGIT_STD[gate] if assemble.logit_std is None else assemble.logit_std


def fit_layer(
    layer: DealtLayer,
    experts: ExpertWeights | None,
    neurons_EN: Int[Tensor, "E N"],
    always_S: Int[Tensor, "S"],
    top_k: int,
    settings: RouterSettings,
) -> tuple[RouterTask, LinearRouter]:
    """Fit a layer's router over the experts cut from its own FFN, or over the `experts` of a pool; sets `outputs`.

    The outputs of a pool's experts cost E·N / F times the dense FFN, so only `settings.tokens` tokens are used.
    """
    if experts is None:
        task = watch_experts(layer.ffn, neurons_EN, always_S, layer.inputs, top_k, layer.keep)
        layer.outputs = task.wanted
        return task, fit_router(task, settings)
    layer.outputs = [layer.keep(layer.ffn(x_TD)) for x_TD in layer.inputs]
    seen, wanted = take_tokens(layer.inputs, layer.outputs, settings.tokens)
    task = watch_pool(make_loop(layer.ffn, neurons_EN, always_S, None, top_k, experts), wanted, seen)
    return task, fit_pool_router(task, settings)


@torch.no_grad()
def fit_all(
    stream: LayerStream,
    context: CalibrationContext,
    checkpoint: CheckpointFormat,
    partition: Partition,
    pool: Sequence[ExpertWeights] | None,
    assemble: AssembleConfig,
    scratch: Path,
) -> dict[int, RouterReport]:
    """Run the dense model once, fit each router on the inputs of its FFN, and save each report in `scratch`.

    Workers share the pass; then each fits the router of one layer. Layers that stay dense have no report.
    """
    sources, device, workers = text_sources(context.batches), stream.device, context.workers
    text = len(sources)
    done = workers.lead(lambda: [load_layer_checkpoint(scratch, index, RouterReport) for index in range(stream.depth)])

    def fit(layer: DealtLayer) -> tuple[int, RouterReport]:
        if report := done[layer.index]:
            return layer.index, report
        index = layer.index
        settings = RouterSettings(
            assemble.router, assemble.ridge_penalty, assemble.router_tokens, assemble.router_steps,
            checkpoint.balance_weight, layer_seed(context.seed, index), sources=sources,
        )  # fmt: skip
        neurons_EN = partition.routed(index).to(device)
        always_S, experts = partition.always_on[index].to(device), None if pool is None else pool[index]
        task, router = fit_layer(layer, experts, neurons_EN, always_S, checkpoint.shape.top_k, settings)
        deviation = logit_std(assemble, checkpoint.gate)
        router = set_logit_std(router, layer.inputs[:text], deviation)
        loop = replace(task.loop, router=router, gate=checkpoint.gate if deviation else GateKind.CONSTANT)
        pooled = checkpoint.shape.pooled  # `column_scales` then has all layers' moments
        scale_EN = torch.ones(loop.neurons_EN.shape) if pooled else column_scale(loop, layer.inputs)
        load_E, moments_2E = load_balance(router, task.inputs[:text], task.top_k), gate_moments(loop, task.inputs)
        silent = not any(bool(wanted_TD.any()) for wanted_TD in task.wanted[:text])
        return index, RouterReport(router.to("cpu"), scale_EN.cpu(), moments_2E.cpu(), load_E.cpu(), silent)

    reports: dict[int, RouterReport] = {}
    layers, turns = deal_layers(stream, context.batches, workers, context.memory), -(-stream.depth // workers.world)
    for layer in tqdm(layers, total=turns, desc="assemble", unit="layer"):
        mine = fit(layer) if layer and layer.index not in checkpoint.shape.dense_layers else None
        for index, report in filter(None, workers.gather(mine)):
            if workers.leads and done[index] is None:
                save_layer_checkpoint(scratch, index, report)
            reports[index] = report
    return reports


def column_scales(reports: Mapping[int, RouterReport], partition: Partition) -> Mapping[int, Tensor]:
    """Per layer, the (E, N) scale of its own experts' down columns; in a pool, all layers determine it together."""
    if not partition.pooled:
        return {layer: report.scale_EN for layer, report in reports.items()}
    moments_2E = torch.stack([report.moments_2E for report in reports.values()]).sum(0)
    scale_EN = least_squares(moments_2E)[:, None].expand(partition.neurons.shape)
    return dict(enumerate(torch.split(scale_EN, partition.given)))


def scaled(experts: ExpertWeights, scale_EN: Tensor) -> ExpertWeights:
    """The experts with scaled down columns, in fp32 unless every scale is 1."""
    if bool((scale_EN == 1).all()):
        return experts
    return replace(experts, down_EDN=experts.down_EDN.float() * scale_EN[:, None])
