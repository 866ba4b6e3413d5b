"""transformers' Trainer for a MoE: its text, learning rates per part, own loss, growing logits, load balancing."""

import hashlib
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainingArguments,
)

from instruments.errors import ConfigError, NumericsError
from instruments.training_watch.model_watch import ModelWatch, watch_model
from instruments.training_watch.step_log import NOTE
from models.training import Part, RouterWatch, parameter_groups, show_scores
from stages.artifacts.job import Workers
from stages.losses import supervised_tokens
from stages.text.batches import TokenBatch, TokenSequence, batch_sequences
from stages.text.config import DataConfig
from stages.text.sequences import LoadedText, load_text
from stages.train.config import TrainConfig
from stages.train.objective import (
    Balance,
    LogitSchedule,
    Objective,
    add_up,
    autocast,
    heldout_sums,
    move_biases,
    stretch,
)
from stages.train.phases import Phase, PhaseCallback, rate_factor, rates_of, whole_logs
from stages.train.record import Record, find_latest, mark_whole


@dataclass(frozen=True)
class TrainingText:
    """Training sequences, and held-out batches."""

    train: LoadedText
    heldout: list[TokenBatch]
    pad_id: int
    heldout_hash: str = ""  # does not depend on how the sequences are batched


def read_text(data: DataConfig, train: TrainConfig, tokenizer: PreTrainedTokenizerBase, pad_id: int) -> TrainingText:
    """Read up to `train.tokens` of the calibration split, and the first sequences of the held-out split."""
    text = load_text(replace(data, tokens=train.tokens), tokenizer, "calibration")
    heldout = load_text(data, tokenizer, "heldout").sequences[: train.heldout_sequences]
    content = hashlib.sha256(json.dumps([[sequence.ids, sequence.labels] for sequence in heldout]).encode())
    batches = batch_sequences(heldout, train.micro_batch * data.max_length, pad_id)
    return TrainingText(text, batches, pad_id, content.hexdigest()[:16])


def order_sequences(sequences: Sequence[TokenSequence], first: int, length: int, seed: int) -> list[TokenSequence]:
    """`length` sequences, starting at number `first`, of an endless order: repeated passes, each shuffled differently.

    The order depends on the seed only, so that a run can be resumed at any step.
    """
    ordered: list[TokenSequence] = []
    for number in range(first // len(sequences), -(-(first + length) // len(sequences))):
        shuffle = torch.Generator().manual_seed(seed + number)
        ordered += [sequences[place] for place in torch.randperm(len(sequences), generator=shuffle).tolist()]
    start = first % len(sequences)
    return ordered[start : start + length]


def collate(sequences: Sequence[TokenSequence], pad_id: int) -> dict[str, Tensor]:
    """`input_ids`, `attention_mask` and `labels` of ``(B, T)``, padded on the right to the longest sequence."""
    (batch,) = batch_sequences(sequences, sys.maxsize, pad_id)
    return {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "labels": batch.labels}


logger = logging.getLogger(__name__)

# Usual for language models: second moments average over about twenty steps.
BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class TrainContext:
    """State that all phases share."""

    settings: TrainConfig
    text: TrainingText
    schedule: LogitSchedule
    total: int  # optimizer steps of all phases
    balance: Balance
    teacher: PreTrainedModel | None
    record: Record | None  # None except in the leading process
    seed: int
    workers: Workers
    device: torch.device
    dtype: torch.dtype = torch.float32  # of the written checkpoint

    def heldout_figures(self, model: PreTrainedModel) -> dict[str, float]:
        """Means over the supervised tokens of the held-out text, in nats; the processes share its batches.

        `heldout_loss` is the next-token loss; with a teacher, `heldout_divergence` is KL(teacher ‖ `model`).
        """
        batches, device, world = self.text.heldout, self.device, self.workers.world
        mine = range(self.workers.rank, len(batches), world)
        teacher = None if self.teacher is model else self.teacher
        was_training = model.training
        model.eval()
        totals = torch.zeros(3, dtype=torch.float64, device=device)
        with torch.no_grad(), autocast(self.settings, device):
            for number in mine:
                totals += heldout_sums(model, teacher, batches[number], device)
            if self.settings.fsdp and len(mine) < -(-len(batches) // world):
                # FSDP gathers weights in every forward pass: each process must run as many. This one does not count.
                heldout_sums(model, None, batches[0], device)
        model.train(was_training)
        loss, divergence, tokens = add_up(totals).tolist()
        found = {"heldout_loss": loss / tokens}
        return found if teacher is None else found | {"heldout_divergence": divergence / tokens}


def training_arguments(context: TrainContext, phase: Phase, folder: Path) -> TrainingArguments:
    """Settings of transformers' Trainer."""
    settings = context.settings
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=phase.steps,
        per_device_train_batch_size=settings.micro_batch,
        gradient_accumulation_steps=settings.batch // (settings.micro_batch * context.workers.world),
        max_grad_norm=settings.gradient_norm,
        use_cpu=context.device.type == "cpu",
        ddp_backend="gloo" if context.device.type == "cpu" and context.workers.world > 1 else None,
        ddp_find_unused_parameters=False,
        fsdp=settings.fsdp,
        fsdp_config=settings.fsdp_config,
        train_sampling_strategy="sequential",  # see `order_sequences`
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
    if context.workers.world == 1:
        place(arguments, context.device)
    return arguments


def place(arguments: TrainingArguments, device: torch.device) -> None:
    """Train on this device only: by default Trainer takes the first GPU and copies the model to all others."""
    arguments.distributed_state.device = device
    vars(arguments)["_setup_devices"] = device  # a cached property
    arguments._n_gpu = int(device.type != "cpu")


class MoETrainer(Trainer):  # type: ignore[misc]  # transformers is not typed
    """Trains one phase."""

    # The loss is divided by the supervised tokens of all micro-batches.
    loss_is_scaled_for_ga = True

    def __init__(self, model: PreTrainedModel, phase: Phase, context: TrainContext, folder: Path) -> None:
        """Freezes parameters that do not learn here: DistributedDataParallel reads `requires_grad` only once."""
        self.phase, self.context, settings = phase, context, context.settings
        rates, decay, batch = rates_of(phase, settings), settings.weight_decay, settings.batch
        watch = RouterWatch(model)
        self.shown = show_scores(model) if settings.straight_through else []
        self.objective = Objective(settings, watch, context.teacher, context.balance)
        self.monitor: ModelWatch | None = None
        groups = parameter_groups(model, **rates, weight_decay=decay)
        super().__init__(
            model,
            training_arguments(context, phase, folder),
            partial(collate, pad_id=context.text.pad_id),
            order_sequences(context.text.train.sequences, phase.first * batch, phase.steps * batch, context.seed),
            optimizer_cls_and_kwargs=(AdamW, {"params": groups, "betas": BETAS, "fused": True}),
            callbacks=[PhaseCallback(self)],
        )
        for spoken in (PrinterCallback, ProgressCallback):
            self.remove_callback(spoken)

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> LRScheduler:
        """Each phase has its own warmup and decay; the routers' rate is proportional to the scheduled logit_std."""
        if self.lr_scheduler is None:  # type: ignore[has-type]
            optimizer = self.optimizer if optimizer is None else optimizer
            factors: list[Callable[[int], float]] = [
                partial(self._factor, router=group["name"] == Part.ROUTER) for group in optimizer.param_groups
            ]
            self.lr_scheduler = LambdaLR(optimizer, factors)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def _factor(self, step: int, *, router: bool) -> float:
        factor = rate_factor(step, self.phase, self.context.settings)
        return factor * self.context.schedule.at(self.phase.first + step) if router else factor

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor]:
        """The micro-batches of a step, and the number of supervised tokens in all processes."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        items = torch.stack([supervised_tokens(batch["labels"]).sum() for batch in batches]).sum()
        return batches, add_up(items.to(device))

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Mapping[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Tensor:
        """The loss of the `Objective`."""
        assert not return_outputs, "held-out text is evaluated elsewhere"
        assert num_items_in_batch is not None, "get_batch_samples counts them"
        parts = self.current_gradient_accumulation_steps
        return self.objective.loss(model, inputs, num_items_in_batch, parts, self.args.world_size)

    def start_monitor(self) -> None:
        """Monitor the wrapped model (DistributedDataParallel, FSDP)."""
        if self.context.settings.watch:
            try:
                self.monitor = watch_model(self.model_wrapped)
            except ConfigError as error:
                logger.warning("training goes on unwatched: %s; train.watch=false says so", error.what)

    def stop_watching(self) -> None:
        """Remove all hooks from the model."""
        self.objective.watch.remove()
        for handle in self.shown:
            handle.remove()
        if self.monitor is not None:
            self.monitor.remove()

    def _clip_grad_norm(self, model: nn.Module) -> Any:  # noqa: ANN401 - a tensor, or what a plugin makes of it
        step, found = self.phase.first + self.state.global_step + 1, []
        if self.monitor is not None:
            self.monitor.next_step = step
            found = [anomaly.message for anomaly in self.monitor.step().anomalies if anomaly.severity != NOTE]
            if found and self.context.record is not None:
                self.context.record.warn(step, self.phase.name, found)
        norm = super()._clip_grad_norm(model)
        if not torch.as_tensor(norm).isfinite():
            raise explain_not_finite(self.model, found, step, Path(self.args.output_dir))
        return norm

    def after_step(self) -> None:
        """Move selection biases and stretch the routers; runs before a checkpoint of the step is saved."""
        step, schedule = self.phase.first + self.state.global_step, self.context.schedule
        load_LE, routers = self.objective.take_load(), self.objective.watch.routers
        balance = self.context.balance
        if balance.kind == "selection_bias":
            move_biases(routers, load_LE, balance.bias_step * schedule.at(step - 1), pooled=balance.pooled)
        stretch(routers, schedule.factor(step))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log Trainer's figures together with those of the objective."""
        super().log(logs | self.objective.metrics.collect(), start_time)

    def mark_saved(self, folder: Path) -> None:
        """Mark a checkpoint as complete once every process has written its part."""
        self.accelerator.wait_for_everyone()
        if self.context.record is not None:
            self.context.record.sync()
            mark_whole(folder)
        self.accelerator.wait_for_everyone()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        # Without FSDP, `run_phase` has already loaded the checkpoint. Trainer would skip its experts: the file stores
        # them one by one, the model in one tensor.
        if self.is_fsdp_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)


def explain_not_finite(model: nn.Module, found: list[str], step: int, folder: Path) -> NumericsError:
    """The error for a step whose gradients, in `model`, are not finite; `found` are the monitor's messages."""
    bad = [name for name, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    # The backward pass starts at the last layer.
    place = f"first seen in the gradient of {bad[-1]}" if bad else "in gradients of another process, or their sum"
    last = find_latest(folder)
    return NumericsError(
        f"training step {step} gave no finite gradient and was not applied",
        where=f"{found[0] if found else place}; last good checkpoint: {last[0] if last else 'that before training'}",
        do="lower train.router_rate= and train.expert_rate=, or raise train.warmup_share=",
    )
