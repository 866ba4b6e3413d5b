"""transformers' Trainer with the parts an MoE needs: rates by part, its own loss, growing router logits, even load."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import Sampler, SequentialSampler
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer

from instruments.errors import NumericsError
from models.training import Part, parameter_groups
from stages.losses import supervised_tokens
from stages.train.config import TrainConfig
from stages.train.objective import Objective
from stages.train.phases import Phase, rate_factor, rates_of
from stages.train.routers import LogitSchedule, add_up, move_biases, stretch


def explain_not_finite(model: nn.Module, inputs: Mapping[str, Tensor], step: int, folder: Path) -> NumericsError:
    """The error for a step whose gradients are not finite; it is not applied.

    Args:
        model: as it was before the step, with the gradients.
        inputs: the last micro-batch.
        step: its number.
        folder: of the checkpoints.
    """
    place = first_bad_output(model, inputs)
    if place is None:
        bad = [name for name, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
        # Backwards, the last layer comes first.
        place = f"gradient of {bad[-1]}" if bad else "gradients of another process, or their sum"
    else:
        place = f"output of {place}"
    kept = sorted(folder.glob("checkpoint-*"), key=lambda path: path.stat().st_mtime)
    return NumericsError(
        f"training step {step} gave no finite gradient and was not applied",
        where=f"first seen in the {place}; last good checkpoint: {kept[-1] if kept else 'that before training'}",
        do="lower train.router_rate= and train.expert_rate=, or raise train.warmup_share=",
    )


@torch.no_grad()
def first_bad_output(model: nn.Module, inputs: Mapping[str, Tensor]) -> str | None:
    """The first module, in the order of computation, that makes what is not finite; None where all outputs are."""
    found: list[str] = []

    def look(name: str, output: Any) -> None:  # noqa: ANN401 - whatever a module returns
        tensor = output[0] if isinstance(output, tuple) else output
        if not found and isinstance(tensor, Tensor) and tensor.is_floating_point() and not tensor.isfinite().all():
            found.append(name)

    hooks = [
        module.register_forward_hook(lambda _module, _inputs, output, name=name: look(name, output))
        for name, module in model.named_modules()
        if name
    ]
    try:
        model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else None


# Second moments that forget in some twenty steps, as language models are trained.
BETAS = (0.9, 0.95)


class MoETrainer(Trainer):  # type: ignore[misc]  # transformers is not typed
    """Trains one phase."""

    # The loss is divided by the supervised tokens of all micro-batches.
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        phase: Phase,
        settings: TrainConfig,
        schedule: LogitSchedule,
        objective: Objective,
        look: Callable[[int], object],
        **arguments: Any,  # noqa: ANN401 - of Trainer
    ) -> None:
        """Everything that Trainer wants, the phase, and what looks at gradients before they are clipped."""
        self._look = look
        self.phase, self.settings, self.schedule, self.objective = phase, settings, schedule, objective
        self.routers = objective.watch.routers
        self._last_inputs: Mapping[str, Tensor] = {}
        # Frozen from the start: DistributedDataParallel asks once.
        parameter_groups(model, **rates_of(phase, settings))
        super().__init__(model, **arguments)

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """AdamW with a group for every part that learns."""
        if self.optimizer is None:  # type: ignore[has-type]
            groups = parameter_groups(
                self.model if model is None else model,
                **rates_of(self.phase, self.settings),
                weight_decay=self.settings.weight_decay,
            )
            self.optimizer = AdamW(groups, betas=BETAS)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> LRScheduler:
        """Each phase rises and falls by itself; routers learn as fast as their logits are large."""
        if self.lr_scheduler is None:  # type: ignore[has-type]
            optimizer = self.optimizer if optimizer is None else optimizer
            names = [group["name"] for group in optimizer.param_groups]
            factors: list[Callable[[int], float]] = [
                partial(self._factor, logit_std=name == Part.ROUTER) for name in names
            ]
            self.lr_scheduler = LambdaLR(optimizer, factors)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def _factor(self, step: int, *, logit_std: bool) -> float:
        factor = rate_factor(step, self.phase, self.settings)
        return factor * self.schedule.at(self.phase.first + step) if logit_std else factor

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:  # noqa: ANN401 - any dataset
        # The dataset is in order already.
        return SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor]:
        """The micro-batches of a step, and the supervised tokens of all processes in it."""
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
        """The objective's loss."""
        assert not return_outputs, "held-out text is looked at elsewhere"
        assert num_items_in_batch is not None, "get_batch_samples counts them"
        self._last_inputs = inputs
        parts = self.current_gradient_accumulation_steps
        return self.objective.loss(model, inputs, num_items_in_batch, parts, self.args.world_size)

    def _clip_grad_norm(self, model: nn.Module) -> Any:  # noqa: ANN401 - a tensor, or what a plugin makes of it
        step = self.phase.first + self.state.global_step + 1
        self._look(step)
        norm = super()._clip_grad_norm(model)
        if not torch.as_tensor(norm).isfinite():
            raise explain_not_finite(self.model, self._last_inputs, step, Path(self.args.output_dir))
        return norm

    def after_step(self) -> None:
        """Even out the load, and let the routers' logits grow; what is saved afterwards has both."""
        step = self.phase.first + self.state.global_step
        load_LE = self.objective.take_load()
        balance = self.objective.balance
        if balance.kind == "selection_bias":
            distance = balance.bias_step * self.schedule.at(step - 1)
            move_biases(self.routers, load_LE, distance, pooled=self.objective.pooled)
        stretch(self.routers, self.schedule.factor(step))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Trainer's figures and ours."""
        super().log(logs | self.objective.metrics.collect(), start_time)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        # Trainer reads the file as it is: experts are stored one by one, and in memory they are one tensor, so that it
        # would go on with those it started from.
        if self.is_fsdp_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        saved = AutoModelForCausalLM.from_pretrained(
            resume_from_checkpoint, dtype=self.model.dtype, local_files_only=True
        )
        self.model.load_state_dict(saved.state_dict())
