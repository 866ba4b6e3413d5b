"""The training loop of one phase: micro-batches, gradients of all processes, clipping, figures and checkpoints."""

import logging
import math
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from tqdm import tqdm
from transformers import PreTrainedModel

from instruments.errors import ConfigError, NumericsError
from instruments.training_watch.model_watch import ModelWatch, watch_model
from instruments.training_watch.step_log import NOTE
from models.device import send
from models.structure import decoder_layers
from models.training import Part, RouterWatch, parameter_groups, rounded_weights, show_scores
from stages.artifacts.job import Workers
from stages.losses import measure_losses, supervised_tokens
from stages.text.batches import TokenSequence, batch_sequences
from stages.train.config import TrainConfig
from stages.train.objective import Balance, Objective, Phase, add_up, autocast, move_biases, rate_factor
from stages.train.record import Record, drop_older, find_final, find_latest, mark_whole, saved_step
from stages.train.text import TrainingText

logger = logging.getLogger(__name__)

# Usual for language models: second moments average over about twenty steps.
BETAS = (0.9, 0.95)
OPTIMIZER = "optimizer.safetensors"
DIVERGED = 1.0  # rise of the held-out loss since the start, nats, at which training stops; a carve begins below it


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


def collate(sequences: Sequence[TokenSequence], pad_id: int, device: torch.device) -> dict[str, Tensor]:
    """The inputs of `Objective.loss`, padded on the right to the longest sequence."""
    (batch,) = batch_sequences(sequences, sys.maxsize, pad_id)
    return {**batch.inputs(device), "labels": send(batch.labels, device, torch.int64), "rows": batch.rows(device)}


@dataclass(frozen=True)
class TrainContext:
    """State that all phases share."""

    settings: TrainConfig
    text: TrainingText
    logit_std: float  # of the routers of the carve
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
        batches, workers = self.text.heldout, self.workers
        was_training = model.training
        model.eval()
        with torch.no_grad(), autocast(self.settings, self.device):
            if self.settings.fsdp and workers.rank >= len(batches) % workers.world > 0:
                # FSDP gathers weights in every forward pass: each process must run as many. This one does not count.
                model(**batches[0].inputs(self.device), use_cache=False)
            taught = self.teacher is not None and self.teacher is not model
            models = {"": self.teacher, "model": model} if taught else {"": model}  # no name: no progress bar
            (*_, found) = measure_losses(models, batches, workers).values()
        model.train(was_training)
        figures = {"heldout_loss": found.nats}
        return figures if found.divergence is None else figures | {"heldout_divergence": found.divergence}


class PhaseLoop:
    """Trains one phase; `model` is in float32 and on no particular device."""

    def __init__(self, model: PreTrainedModel, phase: Phase, context: TrainContext, folder: Path) -> None:
        """Freezes parameters that do not learn here, attaches hooks, and distributes the model over the processes."""
        self.model, self.phase, self.context, self.folder = model, phase, context, folder
        settings = self.settings = context.settings
        rates = {name: getattr(settings, name) if part in phase.learns else 0.0 for name, part in _RATES.items()}
        rates["weight_decay"] = settings.weight_decay
        self.shown = show_scores(model) if settings.straight_through else []
        self.objective = Objective(settings, RouterWatch(model), context.teacher, context.balance)
        if not settings.fsdp or context.workers.world == 1:  # FSDP moves each layer's share, and nothing else
            model.to(context.device)
        text_groups(model, rates)  # before: DistributedDataParallel reads `requires_grad` only once
        self.wrapped = distribute(model, context)
        # FSDP's parameters are new. It frees the whole ones that it has put on the GPU only if nothing holds them.
        groups = text_groups(model, rates)
        self.peaks = [group["lr"] for group in groups]
        self.optimizer = AdamW(groups, betas=BETAS, fused=True)
        self.step = 0  # optimizer steps of this phase that are done
        self.losses = torch.zeros((), device=context.device)  # sum since the last log line
        self.logged = 0.0  # start of the training time that no line covers, in seconds
        self.monitor: ModelWatch | None = None

    def run(self, resumed: Path | None) -> None:
        """Train to the end of the phase, from the optimizer's state in the checkpoint `resumed`; write `final`."""
        settings, phase = self.settings, self.phase
        if resumed is not None:
            self.step = saved_step(resumed)
            load_optimizer(self.model, self.optimizer, resumed / OPTIMIZER)
        sequences = order_sequences(
            self.context.text.train.sequences, phase.first * settings.batch, phase.steps * settings.batch,
            self.context.seed,
        )  # fmt: skip
        self.start_monitor()
        bar = tqdm(
            total=self.context.total, initial=phase.first + self.step, desc=f"train {phase.name}", unit="step",
            disable=self.context.record is None,
        )  # fmt: skip
        self.logged, logged = time.perf_counter(), self.step
        with bar:
            while self.step < phase.steps:
                start = self.step * settings.batch
                norm = self.run_step(sequences[start : start + settings.batch])
                bar.update()
                over = self.step == phase.steps
                if over or is_due(self.step, settings.heldout_steps, settings):
                    self.evaluate()
                if over or self.step % settings.log_steps == 0:
                    figures = self.log(float(norm), self.step - logged)
                    logged = self.step
                    bar.set_postfix_str(
                        f"loss {figures['loss']:.4f}, load {figures['load_max_over_mean']:.2f}, "
                        f"{figures['tokens_per_second']:,.0f} tok/s"
                    )
                if not over and is_due(self.step, settings.save_steps, settings):
                    moments = optimizer_tensors(self.model, self.optimizer, kept=self.context.workers.leads)
                    self.save(self.folder / f"checkpoint-{self.step}", moments)
        self.save(self.folder / "final")
        self.stop_watching()

    def run_step(self, sequences: Sequence[TokenSequence]) -> Tensor:
        """One optimizer step on all processes' `sequences`; returns the norm of the gradient before clipping."""
        context, settings, workers = self.context, self.settings, self.context.workers
        step = self.phase.first + self.step
        torch.manual_seed((context.seed << 32) + step * workers.world + workers.rank)  # of dropout
        size = settings.micro_batch
        mine = range(workers.rank * size, len(sequences), workers.world * size)
        batches = [collate(sequences[place : place + size], context.text.pad_id, context.device) for place in mine]
        items = add_up(torch.stack([supervised_tokens(batch["labels"]).sum() for batch in batches]).sum())
        self.wrapped.train()
        for number, batch in enumerate(batches):
            model, last = self.wrapped, number == len(batches) - 1  # until which gradients stay in this process
            with model.no_sync() if isinstance(model, DistributedDataParallel) and not last else nullcontext():
                loss = self.objective.loss(model, batch, items, len(batches), workers.world)
                torch.autograd.backward(loss)
            self.losses += loss.detach()
        norm = self.clip(step + 1)
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak * self.factor(self.step, router=group["name"] == Part.ROUTER)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.balance_load()
        return norm

    def factor(self, step: int, *, router: bool) -> float:
        """Share of the peak rate; the routers' rate is proportional to the size of their logits."""
        factor = rate_factor(step, self.phase, self.settings)
        return factor * self.context.logit_std if router else factor

    def clip(self, step: int) -> Tensor:
        """Clip the gradients, and return their norm before. Raises NumericsError: it is not finite."""
        found: list[str] = []
        if self.monitor is not None:
            self.monitor.next_step = step
            found = [anomaly.message for anomaly in self.monitor.step().anomalies if anomaly.severity != NOTE]
            if found and self.context.record is not None:
                self.context.record.write(step, self.phase.name, {"warnings": found})
        learning = [*self.wrapped.parameters()]
        total = nn.utils.get_total_norm([parameter.grad for parameter in learning if parameter.grad is not None])
        norm = whole_tensor(total)
        if not norm.isfinite():  # before clipping, which would spread it to all gradients
            raise explain_not_finite(self.wrapped, found, step, self.folder)
        nn.utils.clip_grads_with_norm_(learning, self.settings.gradient_norm, total)
        return norm

    def balance_load(self) -> None:
        """Move selection biases after a step."""
        load_LE, balance = self.objective.take_load(), self.context.balance
        if balance.kind == "selection_bias":
            step = balance.bias_step * self.context.logit_std
            move_biases(self.objective.watch.routers, load_LE, step, pooled=balance.pooled)

    def evaluate(self) -> None:
        """Measure held-out text with all processes; the last time with the weights as they are written."""
        step, context, start = self.phase.first + self.step, self.context, time.perf_counter()
        with rounded_weights(self.model, context.dtype if step == context.total else torch.float32):
            figures = context.heldout_figures(self.model)
        self.logged += time.perf_counter() - start  # not a part of the training speed
        losses: list[float] = []
        if context.record is not None:
            context.record.write(step, self.phase.name, figures)
            losses = [line["heldout_loss"] for line in context.record.lines if "heldout_loss" in line]
        losses = context.workers.broadcast(losses)  # the first is that before training
        if not losses[-1] < losses[0] + DIVERGED:  # or it is no number
            what = (
                f"training diverges: held-out loss {losses[-1]:.2f} after step {step}, {losses[0]:.2f} before training"
            )
            raise spoiled(what, "", self.folder)

    def log(self, norm: float, steps: int) -> dict[str, float]:
        """Write and return the figures of the last `steps` steps; `norm` is that of the last gradient."""
        loss = float(add_up(self.losses)) / (steps * self.context.workers.world)
        self.losses.zero_()
        metrics = self.objective.metrics.collect()
        step, now = self.phase.first + self.step, time.perf_counter()
        figures = {
            "loss": loss,
            "gradient_norm": norm,
            **metrics,
            "perplexity": math.exp(min(700.0, metrics["language_model"])),
            "tokens_per_second": metrics["tokens"] / (now - self.logged),
        }
        self.logged = now
        if self.context.record is not None:
            figures["tokens"] = self.context.record.count(int(metrics["tokens"]))
            self.context.record.write(step, self.phase.name, figures)
        return figures

    def save(self, folder: Path, moments: Mapping[str, Tensor] = MappingProxyType({})) -> None:
        """Write a checkpoint with these tensors of the optimizer and the record so far; then remove older ones."""
        start = time.perf_counter()
        sharded = self.model.state_dict(keep_vars=True)
        leads = self.context.workers.leads
        # Once where embeddings are tied.
        whole = {tensor: whole_tensor(tensor.detach(), kept=leads) for tensor in sharded.values()}
        weights = {name: whole[tensor] for name, tensor in sharded.items()}
        if self.context.record is not None:
            self.model.save_pretrained(folder, state_dict=weights)
            save_file(dict(moments), folder / OPTIMIZER)
            self.context.record.save(folder)
            mark_whole(folder)
            drop_older(folder)
        self.context.workers.broadcast(None)  # all wait until the checkpoint is written
        self.logged += time.perf_counter() - start

    def start_monitor(self) -> None:
        """Watch the distributed model."""
        if self.settings.watch:
            try:
                self.monitor = watch_model(self.wrapped)
            except ConfigError as error:
                logger.warning("training goes on unwatched: %s; train.watch=false says so", error.what)

    def stop_watching(self) -> None:
        """Remove all hooks from the model."""
        self.objective.watch.remove()
        for handle in self.shown:
            handle.remove()
        if self.monitor is not None:
            self.monitor.remove()


_RATES = {"router_rate": Part.ROUTER, "expert_rate": Part.EXPERTS, "rest_rate": Part.REST}


def text_groups(model: PreTrainedModel, rates: Mapping[str, float]) -> list[dict[str, Any]]:
    """`parameter_groups` of what reads text; text gives the parts for images no gradient, so they are frozen."""
    groups = parameter_groups(model, **rates)
    if model.config.get_text_config(decoder=True) is model.config:
        return groups
    text = model.get_submodule(decoder_layers(model)[0].rpartition(".")[0])
    parts = (text, model.get_input_embeddings(), model.get_output_embeddings())
    read = {parameter for part in parts if part is not None for parameter in part.parameters()}
    for parameter in {*model.base_model.parameters()} - read:
        parameter.requires_grad_(False)
    for group in groups:
        group["params"] = [parameter for parameter in group["params"] if parameter.requires_grad]
    return [group for group in groups if group["params"]]


def is_due(step: int, every: int, settings: TrainConfig) -> bool:
    """Whether `every` steps have passed, rounded up to log lines: a kill must not split the sums of one. 0: never."""
    return every > 0 and step % (math.ceil(every / settings.log_steps) * settings.log_steps) == 0


def distribute(model: nn.Module, context: TrainContext) -> nn.Module:
    """The model for one of several processes: a copy in each, or with `train.fsdp` a share of every decoder layer."""
    if context.workers.world == 1:
        return model
    if context.settings.fsdp:
        if context.device.type != "cpu":
            torch.accelerator.set_device_index(context.device)  # on which FSDP puts the shares
        mesh = init_device_mesh(context.device.type, (context.workers.world,))
        for module in (*decoder_layers(model)[1], model):
            # Resharded after held-out text, too: names stay those of shards.
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
        return model
    devices = None if context.device.type == "cpu" else [context.device]
    # Without the views, it keeps a copy of each gradient.
    return DistributedDataParallel(model, devices, gradient_as_bucket_view=True)


def whole_tensor(tensor: Tensor, *, kept: bool = True) -> Tensor:
    """The whole of a sharded tensor, in host memory; empty in a process where it is not `kept`, which takes part, too.

    Other tensors as they are.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    whole = tensor.full_tensor()
    return whole.cpu() if kept else whole.new_empty(0)


def optimizer_tensors(model: nn.Module, optimizer: AdamW, *, kept: bool = True) -> dict[str, Tensor]:
    """Moments and step counts by parameter; those of shards are put together where they are `kept`."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{names[parameter]}/{kind}": whole_tensor(tensor, kept=kept)
        for parameter, state in optimizer.state.items()
        for kind, tensor in state.items()
    }


def load_optimizer(model: nn.Module, optimizer: AdamW, path: Path) -> None:
    """Load what `optimizer_tensors` returned, with any number of processes."""
    parameters = dict(model.named_parameters())
    with safe_open(path, "pt") as file:
        for key in file.keys():  # noqa: SIM118 - no dict
            name, _, kind = key.partition("/")
            parameter = parameters[name]
            tensor = file.get_tensor(key).to(parameter.device)
            if isinstance(parameter, DTensor) and kind != "step":
                tensor = distribute_tensor(tensor, parameter.device_mesh, parameter.placements)
            optimizer.state[parameter][kind] = tensor


def explain_not_finite(model: nn.Module, found: list[str], step: int, folder: Path) -> NumericsError:
    """The error for a step whose gradients, in `model`, are not finite; `found` are the monitor's messages."""
    bad = [name for name, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    # The backward pass starts at the last layer.
    place = f"first seen in the gradient of {bad[-1]}" if bad else "in gradients of another process, or their sum"
    what = f"training step {step} gave no finite gradient and was not applied"
    return spoiled(what, found[0] if found else place, folder)


def spoiled(what: str, place: str, folder: Path) -> NumericsError:
    """The error for training that spoils the weights; `folder` is that of the phase."""
    last = f"last checkpoint: {find_latest(folder) or find_final(folder.parent) or 'that before training'}"
    do = "lower train.router_rate=, train.expert_rate= and train.rest_rate=, or raise train.warmup_share="
    return NumericsError(what, where="; ".join(filter(None, (place, last))), do=do)
