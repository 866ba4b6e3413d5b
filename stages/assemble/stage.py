"""assemble: fit a router per layer on the dense model's inputs, write experts and routers as a native checkpoint."""

from pathlib import Path

import torch
from tqdm import tqdm

from models.config import ModelConfig
from models.experts import LayerExperts
from models.families.emit import checkpoint_dtype, emit_checkpoint
from models.families.moe import MoETarget, select_target
from models.loading import load_tokenizer, resolve_device
from models.memory import release_freed_memory
from models.shape import Shape
from models.source import read_config, resolve_folder
from models.stream import LayerStream
from stages.assemble.config import AssembleConfig
from stages.assemble.replicas import divide_by_multiplicity
from stages.assemble.report import RouterReport, summarise
from stages.assemble.router import fit_router, load_balance, oracle_agreement, set_spread, watch_experts
from stages.calibration.batches import calibration_batches
from stages.calibration.card import write_carve_card
from stages.calibration.layer_seed import layer_seed
from stages.calibration.token_stream import TokenStream
from stages.contracts.experts import load_layer
from stages.contracts.job import Job, Table
from stages.contracts.partition import Partition
from stages.contracts.routers import Routers
from stages.data.batches import TokenBatch
from stages.data.config import DataConfig


def run(job: Job, *, model: ModelConfig, data: DataConfig, assemble: AssembleConfig, shape: Shape, seed: int) -> Table:
    """Write `checkpoint/` and the routers."""
    folder = resolve_folder(model)
    source = read_config(folder)
    target = select_target(source["model_type"], assemble.target, shape.always_on)
    partition = Partition.load(job.parents["cluster"])
    batches = calibration_batches(data, load_tokenizer(folder), assemble.batch_tokens)
    with LayerStream(folder, device=resolve_device(model)) as stream:
        reports = fit_all(stream, batches, partition, assemble, shape, seed)
    release_freed_memory()
    dtype = checkpoint_dtype(folder, assemble.dtype)
    rows_LED = torch.stack([report.rows_ED for report in reports]).to(dtype).float()
    routers = Routers(assemble.router, target.model_type, assemble.dtype, str(dtype).removeprefix("torch."), rows_LED)
    routers.save(job.out)
    checkpoint = emit(job, folder, target, shape, partition, routers)
    write_carve_card(checkpoint, model, shape, partition, routers, "none: experts are the dense slices")
    return summarise(reports, target, shape, partition)


@torch.no_grad()
def fit_all(
    stream: LayerStream,
    batches: list[TokenBatch],
    partition: Partition,
    assemble: AssembleConfig,
    shape: Shape,
    seed: int,
) -> list[RouterReport]:
    """Pass the dense model's layers once, fitting each router on the inputs its FFN sees."""
    tokens = TokenStream(stream, batches)
    spread = assemble.parity_spread if assemble.mode == "parity" else 1.0
    reports = []
    for index, layer in enumerate(tqdm(stream.layers(), total=stream.depth, desc="assemble", unit="layer")):
        tokens.enter(layer)
        units_EN = partition.units[index].to(stream.device)
        task, outputs = watch_experts(layer.ffn, units_EN, tokens.inputs, shape.top_k)
        rows_ED = fit_router(assemble.router, task, penalty=assemble.ridge_penalty, seed=layer_seed(seed, index))
        rows_ED = set_spread(rows_ED, tokens.inputs, spread)
        load_E = load_balance(rows_ED, tokens.inputs, shape.top_k)
        reports.append(RouterReport(rows_ED.cpu(), load_E.cpu(), oracle_agreement(rows_ED, task)))
        tokens.leave(outputs)
    return reports


def emit(
    job: Job,
    folder: Path,
    target: MoETarget,
    shape: Shape,
    partition: Partition,
    routers: Routers,
) -> Path:
    """Write the checkpoint from the extracted experts, a layer at a time."""
    multiplicity_LF = partition.multiplicity

    def experts(layer: int) -> LayerExperts:
        slices = load_layer(job.parents["extract"], layer)
        if shape.top_k < shape.experts:
            return slices
        return divide_by_multiplicity(slices, partition.units[layer], multiplicity_LF[layer])

    checkpoint = job.out / "checkpoint"
    emit_checkpoint(
        folder,
        checkpoint,
        target=target,
        shape=shape,
        routers=lambda layer: routers.rows[layer],
        experts=experts,
        dtype=routers.dtype_asked,
    )
    return checkpoint
