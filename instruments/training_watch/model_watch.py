"""Watch a model while it is trained.

    with watch_model(model, log="watch.jsonl") as watch:
        for batch in batches:
            loss = model(**batch).loss
            loss.backward()
            watch.step(loss)  # before gradients are clipped
            optimizer.step()
            optimizer.zero_grad()

With `optimizer=` there is no `watch.step`: gradients are looked at when `scaler.unscale_` is done with them, or else
when the optimizer takes its step, after clipping.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from instruments.errors import ConfigError
from instruments.training_watch.step_log import SEVERE, StepLog, StepReport, WatchConfig, logger
from instruments.training_watch.verdict import Measurement, find_trainable

if TYPE_CHECKING:
    from instruments.tensor_dump.tensor_dump import TensorDump


class ModelWatch:
    """A watched model, until `remove` or the end of the `with` block. See `watch_model`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        scaler: GradScaler | None,
        config: WatchConfig,
        log: Path | None,
        dump: "TensorDump | None",
        first_step: int,
    ) -> None:
        """Put the hooks on; a scaler that is switched off counts as none."""
        self.optimizer, self.dump = optimizer, dump
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.next_step = first_step
        self.last: StepReport | None = None
        self.measurement = Measurement(model, find_trainable(model, optimizer), config)
        self._log = StepLog(log, config)
        self._loss: Tensor | float | None = None
        self._unscaled = False  # in this step, by the scaler
        self._undo: list[Callable[[], None]] = [handle.remove for handle in self.measurement.handles]
        if optimizer is not None:
            self._follow(optimizer)
        if dump is not None:
            dump.__enter__()

    def note_loss(self, loss: Tensor | float) -> None:
        """The loss of this step, where `optimizer=` says when the step is."""
        if isinstance(loss, Tensor) and loss.numel() != 1:
            raise ConfigError(
                f"a loss of shape {tuple(loss.shape)} is no single number", where="watch_model", do="loss.mean()"
            )
        self._loss = loss.detach().reshape(()) if isinstance(loss, Tensor) else loss

    def step(self, loss: Tensor | float | None = None) -> StepReport:
        """Look at gradients that are unscaled and not yet clipped. Raises ConfigError: the optimizer is followed."""
        if self.optimizer is not None:
            raise ConfigError(
                "the optimizer tells when a step is: step() would look at its gradients twice",
                where="watch_model(optimizer=...)",
                do="watch.note_loss(loss), or leave out optimizer=",
            )
        if loss is not None:
            self.note_loss(loss)
        return self._measure()

    def _measure(self, factor: Tensor | None = None) -> StepReport:
        report = self.measurement.read(self.next_step, self._loss, self.scaler, factor)
        self.last, self._loss = report, None
        self.next_step += 1
        self._log.write(report)
        if self.dump is not None:
            bad = any(anomaly.severity == SEVERE for anomaly in report.anomalies)
            self.dump.step(float("nan") if bad else 0.0)
        return report

    def _follow(self, optimizer: Optimizer) -> None:
        inner: Any = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        self._undo.append(inner.register_step_pre_hook(self._before_step).remove)
        if self.scaler is None:
            return
        scaler: Any = self.scaler
        unscale = scaler.unscale_

        def unscale_and_look(asked: Optimizer) -> None:
            unscale(asked)
            if asked is inner or asked is optimizer:
                self._unscaled = True
                self._measure()

        # scaler.step() skips the optimizer where gradients are not finite: its hook alone would miss them.
        scaler.unscale_ = unscale_and_look
        self._undo.append(lambda: delattr(scaler, "unscale_"))

    def _before_step(self, optimizer: Any, *_: Any) -> None:  # noqa: ANN401 - the signature of the hook
        if self._unscaled:
            self._unscaled = False
            return
        # Fused optimizers unscale inside of their step.
        scale = getattr(optimizer, "grad_scale", None)
        self._measure(None if scale is None else 1 / scale)

    def remove(self) -> None:
        """Take all hooks off; what was found stays."""
        for undo in self._undo:
            undo()
        self._undo = []

    def __enter__(self) -> "ModelWatch":
        """The hooks are there already."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        """Take the hooks off, end the dump."""
        self.remove()
        if self.dump is not None:
            self.dump.__exit__(kind, *details)


def watch_model(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    scaler: GradScaler | None = None,
    config: WatchConfig | None = None,
    *,
    log: Path | str | None = None,
    dump: Path | str | None = None,
    dump_steps: int = 2,
    first_step: int = 0,
) -> ModelWatch:
    """Watch gradients, outputs and the loss scale of a model in training; nothing it computes changes.

    Args:
        model: any; frozen parameters are left out, tied ones counted once.
        optimizer: looked at by itself whenever it takes a step; of its parameters only those of the model. None: call
            `step(loss)`.
        scaler: whose scale is judged, too.
        config: thresholds.
        log: file of JSON lines, one a step.
        dump: folder for the tensors of the last steps before one that is not finite, as `instruments.tensor_dump`
            writes them.
        dump_steps: how many of them.
        first_step: number of the first step, in a run that is taken up again.
    Raises:
        ConfigError: the model is sharded in a way that hides its layers.
    """
    dumped = None
    if dump is not None:
        # Watching alone needs torch and nothing else.
        from instruments.tensor_dump.config import DumpConfig  # noqa: PLC0415
        from instruments.tensor_dump.tensor_dump import TensorDump  # noqa: PLC0415

        dumped = TensorDump(model, Path(dump), DumpConfig(last_steps=dump_steps), environment={})
    watch = ModelWatch(
        model, optimizer, scaler, config or WatchConfig(), None if log is None else Path(log), dumped, first_step
    )
    if not watch.measurement.parameters:
        logger.warning("no parameter asks for a gradient: only outputs and the loss are watched")
    return watch
