"""What Trainer calls between steps: the load, the log, the held-out text, the mark of a whole checkpoint."""

import logging
import math
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm
from transformers import TrainerCallback

from instruments.durable import sync, sync_tree
from instruments.errors import ConfigError
from instruments.training_watch.model_watch import ModelWatch, watch_model
from instruments.training_watch.step_log import NOTE, WatchConfig
from stages.train.config import TrainWatchConfig
from stages.train.phases import Phase
from stages.train.record import Record

if TYPE_CHECKING:
    from stages.train.trainer import MoETrainer

logger = logging.getLogger(__name__)

WHOLE = "whole"  # marks a folder in which nothing is missing
_PREFIX = "checkpoint-"


def mark_whole(folder: Path) -> None:
    """Say that everything in the folder has been written, once it is on the disk."""
    sync_tree(folder)
    (folder / WHOLE).touch()
    sync(folder)


def is_whole(folder: Path) -> bool:
    """Whether it was marked."""
    return (folder / WHOLE).exists()


def find_latest(folder: Path) -> tuple[Path, int] | None:
    """The last whole checkpoint of a phase, and its step within the phase."""
    found = [(int(path.name.removeprefix(_PREFIX)), path) for path in folder.glob(f"{_PREFIX}*") if is_whole(path)]
    if not found:
        return None
    step, path = max(found)
    return path, step


def drop_unfinished(folder: Path) -> None:
    """Remove what a kill left half written."""
    for path in folder.glob("*"):
        if path.is_dir() and not is_whole(path):
            shutil.rmtree(path)


# Of Trainer's own figures.
_KEPT = {"loss": "loss", "grad_norm": "gradient_norm"}


class AfterStep(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Lets the trainer even out the load and stretch the routers before anything is saved."""

    trainer: "MoETrainer"

    def on_step_end(self, *_: Any, **__: Any) -> None:  # noqa: ANN401 - the signature of Trainer
        """After the optimizer."""
        self.trainer.after_step()


class Log(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """A line of the record and of the console for every log of Trainer, and now and then the held-out loss."""

    def __init__(
        self,
        record: Record | None,
        phase: Phase,
        *,
        total: int,
        seen: int,
        heldout: Callable[[], float],
        heldout_steps: int,
        logit_std: Callable[[int], float],
    ) -> None:
        """Of one phase.

        Args:
            record: None in processes that do not lead.
            phase: its steps are counted on from those of earlier phases.
            total: steps of all phases.
            seen: tokens that were trained on before.
            heldout: measures the held-out loss; called by all processes.
            heldout_steps: every so many; 0: never before the end of the phase.
            logit_std: that of the router logits by step.
        """
        self.record, self.phase, self.total, self.tokens = record, phase, total, seen
        self.heldout, self.heldout_steps, self.logit_std = heldout, heldout_steps, logit_std
        self.bar: tqdm[Any] | None = None
        self._time = time.perf_counter()

    def on_train_begin(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:  # noqa: ANN401
        """The bar goes over all phases."""
        done = self.phase.first + state.global_step
        if self.record is not None:
            self.bar = tqdm(total=self.total, initial=done, desc=f"train {self.phase.name}", unit="step")
        self._time = time.perf_counter()

    def on_step_end(self, _args: Any, state: Any, control: Any, **__: Any) -> None:  # noqa: ANN401
        """Look at the held-out text; log the last step, whichever its number."""
        if self.bar is not None:
            self.bar.update()
        over = state.global_step == self.phase.steps
        control.should_log |= over
        if over or (self.heldout_steps and state.global_step % self.heldout_steps == 0):
            nats = self.heldout()
            self._write(self.phase.first + state.global_step, {"heldout_loss": nats})

    def on_log(self, _args: Any, state: Any, _control: Any, logs: Mapping[str, float], **__: Any) -> None:  # noqa: ANN401
        """Trainer's figures and ours."""
        if "loss" not in logs or "tokens" not in logs:
            return  # the summary at the end
        ours = {name: value for name, value in logs.items() if name not in {*_KEPT, "learning_rate", "epoch", "tokens"}}
        self.tokens += int(logs["tokens"])
        step, now = self.phase.first + state.global_step, time.perf_counter()
        figures = {_KEPT[name]: logs[name] for name in _KEPT if name in logs} | ours
        figures |= {
            "perplexity": math.exp(min(700.0, logs["language_model"])),
            "tokens": self.tokens,
            "tokens_per_second": logs["tokens"] / (now - self._time),
            "router_spread": self.logit_std(step),
        }
        self._time = now
        self._write(step, figures)
        if self.bar is not None:
            self.bar.set_postfix_str(
                f"loss {figures['loss']:.4f}, load {figures['load_max_over_mean']:.2f}, "
                f"{figures['tokens_per_second']:,.0f} tok/s"
            )

    def on_train_end(self, *_: Any, **__: Any) -> None:  # noqa: ANN401
        """The bar is done."""
        if self.bar is not None:
            self.bar.close()

    def _write(self, step: int, figures: Mapping[str, float]) -> None:
        if self.record is not None:
            self.record.write(step, self.phase.name, figures)


class MarkSaved(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Marks a checkpoint once every process has written its part."""

    trainer: "MoETrainer"

    def on_save(self, args: Any, state: Any, *_: Any, **__: Any) -> None:  # noqa: ANN401
        """After Trainer saved."""
        self.trainer.accelerator.wait_for_everyone()
        if args.should_save:
            mark_whole(Path(args.output_dir) / f"checkpoint-{state.global_step}")
        self.trainer.accelerator.wait_for_everyone()


class Monitor(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Watches the model as it is trained, wrapped for its processes."""

    trainer: "MoETrainer"

    def __init__(self, settings: TrainWatchConfig, phase: Phase, record: Record | None) -> None:
        """`record` is None in processes that do not lead."""
        self.settings, self.phase, self.record = settings, phase, record
        self._watch: ModelWatch | None = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:  # noqa: ANN401 - the signature of Trainer
        """Put the hooks on."""
        asked = self.settings
        if not asked.enabled:
            return
        limits = WatchConfig(
            vanishing=asked.vanishing, exploding=asked.exploding, dead=asked.dead, activations=asked.outputs
        )
        try:
            self._watch = watch_model(self.trainer.model_wrapped, config=limits)
        except ConfigError as error:
            logger.warning("training goes on unwatched: %s; train.watch.enabled=false says so", error.what)

    def look(self, step: int) -> None:
        """Gradients are whole, unscaled and not yet clipped."""
        if self._watch is None:
            return
        self._watch.next_step = step
        found = [anomaly for anomaly in self._watch.step().anomalies if anomaly.severity != NOTE]
        if found and self.record is not None:
            self.record.warn(step, self.phase.name, [anomaly.message for anomaly in found])

    def on_train_end(self, *_: Any, **__: Any) -> None:  # noqa: ANN401
        """Take them off."""
        if self._watch is not None:
            self._watch.remove()
