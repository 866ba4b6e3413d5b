"""One phase from start to end: Trainer set up, taken up where a kill left it, and its result kept."""

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, PrinterCallback, ProgressCallback, TrainingArguments

from models.loading import explained_memory
from models.training import RouterWatch
from stages.artifacts.job import Workers
from stages.losses import enable_gradient_checkpointing
from stages.train.callbacks import AfterStep, Log, MarkSaved, Monitor, find_latest, mark_whole
from stages.train.config import TrainConfig
from stages.train.objective import Objective, Teacher
from stages.train.phases import Phase
from stages.train.record import Record
from stages.train.routers import Balance, LogitSchedule
from stages.train.text import Collator, OrderedSequences, TrainingText
from stages.train.trainer import MoETrainer


@dataclass(frozen=True)
class TrainContext:
    """What all phases share."""

    settings: TrainConfig
    text: TrainingText
    schedule: LogitSchedule
    total: int  # steps
    balance: Balance
    pooled: bool
    teacher: Teacher | None
    heldout: Callable[[PreTrainedModel], float]
    seed: int
    workers: Workers
    device: torch.device


def run_phase(
    model: PreTrainedModel, phase: Phase, context: TrainContext, folder: Path, record: Record | None, seen: int
) -> None:
    """Train, and leave the model as a native checkpoint in `folder/final`.

    Args:
        model: where the phase starts, on any device.
        phase: which.
        context: what all phases share.
        folder: of this phase; checkpoints of an earlier run in it are gone on from.
        record: where figures go; None in processes that do not lead.
        seen: tokens trained on before.
    """
    watch = RouterWatch(model)
    if context.settings.gradient_checkpointing:
        # Reentrant, it would hide the routers from their own losses.
        enable_gradient_checkpointing(model)
    objective = Objective(context.settings, watch, context.teacher, balance=context.balance, pooled=context.pooled)
    after, saved = AfterStep(), MarkSaved()
    monitor = Monitor(context.settings.watch, phase, record)
    log = Log(
        record,
        phase,
        total=context.total,
        seen=seen,
        heldout=lambda: context.heldout(trainer.model),
        heldout_steps=whole_logs(context.settings.heldout_steps, context.settings),
        logit_std=context.schedule.at,
    )
    batch = context.settings.batch
    trainer = MoETrainer(
        model,
        phase=phase,
        settings=context.settings,
        schedule=context.schedule,
        objective=objective,
        look=monitor.look,
        args=training_arguments(context, phase, folder),
        train_dataset=OrderedSequences(context.text.sequences, phase.first * batch, phase.steps * batch, context.seed),
        data_collator=Collator(context.text.pad_id),
        callbacks=[after, log, saved, monitor],
    )
    after.trainer = saved.trainer = monitor.trainer = trainer
    for spoken in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(spoken)
    found = find_latest(folder)
    lowered = "train.micro_batch= or data.max_length=, or set train.gradient_checkpointing=true"
    with explained_memory(f"stage=train, phase {phase.name}", f"lower {lowered}"):
        trainer.train(resume_from_checkpoint=str(found[0]) if found else None)
    watch.remove()
    trainer.save_model(str(folder / "final"))
    trainer.accelerator.wait_for_everyone()
    if context.workers.leads:
        mark_whole(folder / "final")
        for path in folder.glob("checkpoint-*"):
            shutil.rmtree(path)
    trainer.accelerator.wait_for_everyone()


def training_arguments(context: TrainContext, phase: Phase, folder: Path) -> TrainingArguments:
    """Trainer's own settings."""
    settings = context.settings
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=phase.steps,
        per_device_train_batch_size=settings.micro_batch,
        gradient_accumulation_steps=settings.batch // (settings.micro_batch * context.workers.world),
        max_grad_norm=settings.gradient_norm,
        bf16=settings.precision == "bfloat16",
        use_cpu=context.device.type == "cpu",
        ddp_backend="gloo" if context.device.type == "cpu" and context.workers.world > 1 else None,
        ddp_find_unused_parameters=False,
        fsdp=settings.fsdp,
        fsdp_config=settings.fsdp_config,
        logging_steps=settings.log_steps,
        logging_nan_inf_filter=False,
        save_steps=whole_logs(settings.save_steps, settings),
        save_total_limit=2,
        save_strategy="steps",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        seed=context.seed,
        dataloader_pin_memory=context.device.type != "cpu",
    )


def whole_logs(steps: int, settings: TrainConfig) -> int:
    """Up to a log line: figures are sums between two of them, and nothing is to be counted by halves."""
    return math.ceil(steps / settings.log_steps) * settings.log_steps
