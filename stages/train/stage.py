"""train: continued pretraining of the projected checkpoint; the result is a native checkpoint again."""

import logging
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import models.tiny_onn.register  # noqa: F401 - transformers then knows the project's own class
from instruments.dtypes import dtype_name
from models import loading
from models.card import copy_card
from models.checkpoint.folder import read_checkpoint
from models.config import ModelConfig, MoEShape
from models.emit import copy_tokenizer_files
from models.routing import LinearRouter
from models.source import resolve_folder
from models.targets.base import MoETarget
from models.training import AUTOCAST_IMPLEMENTATION, STRAIGHT_THROUGH, exempt_routers, find_routers, selection_bias
from stages.artifacts.carve import Routers
from stages.artifacts.experts import CheckpointFormat, FormatSettings
from stages.artifacts.job import NOTHING, Job, Table
from stages.losses import enable_gradient_checkpointing
from stages.text.config import DataConfig
from stages.train import record
from stages.train.config import TrainConfig
from stages.train.loop import PhaseLoop, TrainContext
from stages.train.objective import Balance, Phase, make_phases
from stages.train.text import read_text

logger = logging.getLogger(__name__)


def run(
    job: Job,
    *,
    model: ModelConfig,
    data: DataConfig,
    assemble: FormatSettings,
    train: TrainConfig,
    shape: MoEShape,
    seed: int,
) -> Table:
    """Write `checkpoint/`, the routers, `metrics.jsonl` and TensorBoard events; all processes of torchrun take part."""
    model = replace(model, device=job.workers.pick_device(model.device), quantization="none")
    source, routers = resolve_folder(model), Routers.load(job.parents["project"])
    form = CheckpointFormat.of(model, source, assemble, shape)
    tokenizer = loading.load_tokenizer(source, trust_remote_code=model.trust_remote_code)
    text = read_text(data, train, tokenizer)
    phases = make_phases(train, train.batch * (text.train.tokens / len(text.train.sequences)))
    total, (done, saved) = phases[-1].last, steps_done(job, phases)
    # Without distillation the dense model is needed only for the first line of the record.
    dense = loading.load_dense(model, source) if train.logits or not done else None
    if dense is not None and dense.dtype != torch.float32 and train.precision == "float32":
        what = "the dense model is computed in %s, the MoE in float32; with model.dtype=float32 both are"
        logger.warning(what, dtype_name(dense.dtype))
    lines = None
    if job.workers.leads:
        lines = record.Record.open(job.scratch, saved, tensorboard=train.tensorboard)
    job.workers.lead(lambda: lines.check_heldout(text.heldout) if lines else None)
    context = TrainContext(
        settings=train, text=text, total=total, balance=balance_of(train, form.target, shape),
        logit_std=routers.logit_std, teacher=dense if train.logits else None, record=lines, seed=seed,
        workers=job.workers, device=loading.resolve_device(model), dtype=form.dtype,
    )  # fmt: skip
    dense_loss = context.heldout_figures(dense)["heldout_loss"] if dense is not None and not done else None
    del dense
    loading.release_freed_memory()
    trained = run_phases(job, phases, context, done, dense_loss)
    table = NOTHING
    if lines is not None:
        lines.close()
        table = record.summarise(lines.lines, phases, text.train.tokens)
        keep_result(job, trained, form, lines, "; ".join(table.notes))
    job.workers.broadcast(None)  # all wait until the result is written
    return table


def run_phases(job: Job, phases: list[Phase], context: TrainContext, done: int, dense_loss: float | None) -> Path:
    """Train phase by phase, going on after `done` steps; returns the last checkpoint."""
    checkpoint = job.parents["project"] / "checkpoint"
    for phase in phases:
        start, checkpoint = checkpoint, job.scratch / phase.name / record.FINAL
        # `<=`: the last step may be done before `final` is written. Later phases do not need `final` of this one.
        if done <= phase.last and not record.is_whole(checkpoint):
            run_phase(start, phase, context, job.scratch / phase.name, dense_loss)
        dense_loss = None
    return checkpoint


def steps_done(job: Job, phases: list[Phase]) -> tuple[int, Path | None]:
    """Number of steps that a killed run has saved, and its last checkpoint; removes incomplete ones."""
    done, saved = 0, None
    for phase in reversed(phases) if job.workers.leads else ():
        folder = job.scratch / phase.name
        record.drop_unfinished(folder)
        saved = folder / record.FINAL if record.is_whole(folder / record.FINAL) else record.find_latest(folder)
        if saved is not None:
            done = phase.last if saved.name == record.FINAL else phase.first + record.saved_step(saved)
            break
    return int(job.workers.broadcast(done)), saved


def balance_of(train: TrainConfig, target: MoETarget, shape: MoEShape) -> Balance:
    """The method of `train.balance`; `auto`: selection_bias if the architecture has one, else loss."""
    asked = train.balance
    if asked == "auto":
        asked = "loss" if target.selection_bias is None else "selection_bias"
    return Balance(asked, train.bias_rate * target.selection_bias_scale, shape.pooled)


def load_trainable(folder: Path, *, all_experts: bool = False) -> PreTrainedModel:
    """Load the MoE in float32, with kernels whose backward cost does not grow with the square of E."""
    kernels = STRAIGHT_THROUGH if all_experts else AUTOCAST_IMPLEMENTATION
    model = loading.load_whole(folder, dtype=torch.float32, experts_implementation=kernels)
    exempt_routers(model)
    return model


def run_phase(start: Path, phase: Phase, context: TrainContext, folder: Path, dense_loss: float | None = None) -> None:
    """Train from the checkpoint `start`, or resume from the last one in `folder`; write `folder/final`.

    With a `dense_loss`, first write the record's first line: held-out losses of the dense model and of `start`.
    """
    found, settings, workers = record.find_latest(folder), context.settings, context.workers
    # With FSDP, one process of a machine at a time has a whole model in its memory.
    with workers.in_turn() if settings.fsdp else nullcontext():
        model = load_trainable(found or start, all_experts=settings.straight_through)
        # In bfloat16 the graph would keep the weights of all of FSDP's layers, whole.
        if settings.gradient_checkpointing or (settings.fsdp and settings.precision == "bfloat16"):
            # Not reentrant: that would cut the routers' losses off from their gradients.
            enable_gradient_checkpointing(model)
        loop = PhaseLoop(model, phase, context, folder)
    if dense_loss is not None:
        losses = {"dense_heldout_loss": dense_loss} | context.heldout_figures(loop.model)
        if context.record is not None:
            context.record.write(0, "start", losses | {"heldout_text": record.hash_text(context.text.heldout)})
    remedy = "lower train.micro_batch=, or set train.gradient_checkpointing=true"
    with loading.explained_memory(f"stage=train, phase {phase.name}", remedy), context.workers.explained():
        loop.run(found)
    del model, loop
    loading.release_freed_memory()


def keep_result(job: Job, trained: Path, form: CheckpointFormat, lines: record.Record, said: str) -> None:
    """Publish the checkpoint `trained`, its routers, and the record; `said` is for the model card."""
    start, model = job.parents["project"] / "checkpoint", load_trainable(trained)
    write_native(model, start, job.out / "checkpoint", form.dtype)
    copy_card(start, job.out / "checkpoint", said)
    found = [read_router(router, form.target.selection_bias_scale) for router in find_routers(model)]
    routers = Routers.load(job.parents["project"])
    layers = len(routers.rows)
    carved = (layer for layer in range(layers) if layer not in form.shape.dense_layers)
    Routers.of(dict(zip(carved, found, strict=True)), layers, form.dtype, routers.logit_std).save(job.out)
    lines.save(job.out)
    if (job.scratch / record.EVENTS).exists():
        shutil.copytree(job.scratch / record.EVENTS, job.out / record.EVENTS)


def write_native(model: PreTrainedModel, like: Path, folder: Path, dtype: torch.dtype) -> None:
    """Write the weights in `dtype`, with config.json, tokenizer and code of the checkpoint `like`.

    Selection biases stay in float32, as in `like`. The config.json that transformers 5 writes is misread by version 4;
    that of `like` is valid for both.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    tensors, stored = model.state_dict(), read_checkpoint(like)
    shapes = {name: stored[name].shape for name in tensors.keys() & stored.keys()}
    packed = [name for name in shapes if tensors[name].ndim == 3 and shapes[name] != tensors[name].shape]
    turned = {name: tensors[name].mT.contiguous() for name in packed}
    # transformers 5.23 reads the transposed experts of Qwen3-VL-MoE, but writes them as they are in memory.
    how = {"state_dict": tensors | turned, "save_original_format": False} if turned else {}
    model.save_pretrained(folder, **how)
    for path in like.iterdir():
        if path.suffix in {".json", ".py"} and not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)
    copy_tokenizer_files(like, folder)


def read_router(router: nn.Module, bias_scale: float) -> LinearRouter:
    """Rows and selection bias of a router; the bias in the unit of the logits."""
    bias_E = selection_bias(router)
    weight: Tensor = router.weight  # type: ignore[assignment]
    rows_ED = weight.detach().float()
    return LinearRouter.without_bias(rows_ED) if bias_E is None else LinearRouter(rows_ED, bias_E.float() / bias_scale)
