"""Phases of training: the parts that learn, their learning rates, and what happens between the steps."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm
from transformers import TrainerCallback

from models.training import Part, rounded_weights
from stages.train.config import TrainConfig

if TYPE_CHECKING:
    from stages.train.trainer import MoETrainer


@dataclass(frozen=True)
class Phase:
    """Consecutive optimizer steps in which the same parts learn."""

    name: str
    first: int  # number of steps of earlier phases
    steps: int
    learns: frozenset[Part]

    @property
    def last(self) -> int:
        """Number of steps at its end, earlier phases included."""
        return self.first + self.steps


_LEARNS = {
    "router": frozenset({Part.ROUTER}),
    "experts": frozenset({Part.ROUTER, Part.EXPERTS}),
    "all": frozenset(Part),
}
_RATES = {"router_rate": Part.ROUTER, "expert_rate": Part.EXPERTS, "rest_rate": Part.REST}


def make_phases(settings: TrainConfig, step_tokens: float) -> list[Phase]:
    """The phases with a share above 0, each of at least one step of `step_tokens` tokens."""
    phases: list[Phase] = []
    for name, learns in _LEARNS.items():
        share = getattr(settings, f"{name}_share")
        if share > 0:
            first = phases[-1].last if phases else 0
            phases.append(Phase(name, first, max(1, round(share * settings.tokens / step_tokens)), learns))
    return phases


def rate_factor(step: int, phase: Phase, settings: TrainConfig) -> float:
    """Share of the peak rate at a phase's step (from 0): a linear rise, 1, then half a cosine down to `final_rate`."""
    warmup = math.ceil(settings.warmup_share * phase.steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    start = max(warmup, math.floor((1 - settings.decay_share) * phase.steps))
    progress = min(1.0, max(0, step - start) / max(1, phase.steps - start))
    return settings.final_rate + (1 - settings.final_rate) * 0.5 * (1 + math.cos(math.pi * progress))


def rates_of(phase: Phase, settings: TrainConfig) -> dict[str, float]:
    """Peak rates as arguments of `parameter_groups`; 0 for parts that do not learn."""
    return {name: getattr(settings, name) if part in phase.learns else 0.0 for name, part in _RATES.items()}


# Trainer's figures → names in the record.
_KEPT = {"loss": "loss", "grad_norm": "gradient_norm"}


def whole_logs(steps: int, settings: TrainConfig) -> int:
    """Round up to a multiple of `log_steps`: figures are sums between log lines, and a kill must not split one."""
    return math.ceil(steps / settings.log_steps) * settings.log_steps


class PhaseCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Callbacks of one phase; arguments as Trainer passes them."""

    bar: "tqdm[Any]"  # over all phases
    logged: float  # start of the training time that no line covers, in seconds

    def __init__(self, trainer: "MoETrainer") -> None:
        """Callbacks for this trainer."""
        self.trainer, self.phase, self.context = trainer, trainer.phase, trainer.context
        self.record = self.context.record

    def on_train_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:  # noqa: ANN401
        """Start the monitor, and a progress bar at the steps done before."""
        state.compute_steps(args, state.max_steps)  # a resumed state has log_steps and save_steps of the killed run
        self.trainer.start_monitor()
        self.bar = tqdm(
            total=self.context.total, initial=self.phase.first + state.global_step, desc=f"train {self.phase.name}",
            unit="step", disable=self.record is None,
        )  # fmt: skip
        self.logged = time.perf_counter()

    def on_step_end(self, _args: Any, state: Any, control: Any, **__: Any) -> None:  # noqa: ANN401
        """Balance the load before a save; evaluate held-out text; always log the last step."""
        self.trainer.after_step()
        self.bar.update()
        over = state.global_step == self.phase.steps
        control.should_log |= over
        every = whole_logs(self.context.settings.heldout_steps, self.context.settings)
        if over or (every and state.global_step % every == 0):
            step, context = self.phase.first + state.global_step, self.context
            # All processes evaluate, the leading one writes. The last figures are those of the checkpoint as written.
            start = time.perf_counter()
            with rounded_weights(self.trainer.model, context.dtype if step == context.total else torch.float32):
                figures = context.heldout_figures(self.trainer.model)
            self.logged += time.perf_counter() - start  # not a part of the training speed
            if self.record is not None:
                self.record.write(step, self.phase.name, figures)

    def on_log(self, _args: Any, state: Any, _control: Any, logs: Mapping[str, float], **__: Any) -> None:  # noqa: ANN401
        """Write a line with the figures of Trainer and of the objective."""
        if self.record is None or "tokens" not in logs:
            return  # Trainer's summary at the end has no tokens
        ours = {name: value for name, value in logs.items() if name not in {*_KEPT, "learning_rate", "epoch", "tokens"}}
        self.record.tokens += int(logs["tokens"])
        step, now = self.phase.first + state.global_step, time.perf_counter()
        figures = {_KEPT[name]: logs[name] for name in _KEPT if name in logs} | ours
        figures |= {
            "perplexity": math.exp(min(700.0, logs["language_model"])),
            "tokens": self.record.tokens,
            "tokens_per_second": logs["tokens"] / (now - self.logged),
            "logit_std": self.context.schedule.at(step),
        }
        self.logged = now
        self.record.write(step, self.phase.name, figures)
        self.bar.set_postfix_str(
            f"loss {figures['loss']:.4f}, load {figures['load_max_over_mean']:.2f}, "
            f"{figures['tokens_per_second']:,.0f} tok/s"
        )

    def on_save(self, args: Any, state: Any, *_: Any, **__: Any) -> None:  # noqa: ANN401
        """Mark the checkpoint as complete."""
        self.trainer.mark_saved(Path(args.output_dir) / f"checkpoint-{state.global_step}")
        self.logged = time.perf_counter()  # saving follows a line of the same step

    def on_train_end(self, *_: Any, **__: Any) -> None:  # noqa: ANN401
        """Remove all hooks from the model."""
        self.bar.close()
        self.trainer.stop_watching()
