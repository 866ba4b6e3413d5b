"""watch_model in transformers' Trainer: gradient norms before clipping, with or without a GradScaler.

Trainer(..., callbacks=[WatchCallback(log="watch.jsonl")])
"""

from torch import nn
from torch.optim import Optimizer
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from instruments.training_watch.model_watch import LOG, ModelWatch, watch_model
from instruments.training_watch.step_log import Sink, WatchConfig


class WatchCallback(TrainerCallback):  # type: ignore[misc]
    """Watches the model during training; `watch` is its ModelWatch from the start of training on."""

    def __init__(self, config: WatchConfig | None = None, *, log: Sink = None, on_severe: str = LOG) -> None:
        """The arguments are those of `watch_model`."""
        self._config, self._log, self._on_severe = config, log, on_severe
        self.watch: ModelWatch | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **_: object
    ) -> None:
        """Add the hooks; those of a training that raised are removed first."""
        if self.watch is not None:
            self.watch.remove()
        first, on_severe = state.global_step + 1, self._on_severe
        self.watch = watch_model(model, config=self._config, log=self._log, first_step=first, on_severe=on_severe)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, optimizer: Optimizer, **_: object
    ) -> None:
        """Judge the step, by Trainer's number."""
        if self.watch is not None:
            self.watch.next_step = state.global_step + 1
            self.watch.step(optimizer)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Remove the hooks."""
        if self.watch is not None:
            self.watch.remove()
