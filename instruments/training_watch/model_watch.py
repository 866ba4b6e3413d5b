"""Watch a model during training.

Gradient norms are measured at the end of each backward pass, before clipping. They are judged at the step of a torch
optimizer that has parameters of the model (with a closure, after its first evaluation); with a GradScaler, after
`unscale_`. With several optimizers (GAN, Muon and
AdamW) each has reports of its own; a step ends when one of them steps again. A loop that calls `watch.step(loss)`
itself, before clipping, turns following of optimizers off.
"""

import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from instruments.errors import ConfigError
from instruments.hooks import OwnHook, in_backward, in_training_pass
from instruments.training_watch.gradient_norms import gradient_norms, on_each_step
from instruments.training_watch.measurement import Measurement, find_parameters, logger
from instruments.training_watch.step_log import SEVERE, StepLog, StepReport, WatchConfig

if TYPE_CHECKING:
    from instruments.tensor_dump.tensor_dump import TensorDump

_unscale = GradScaler.unscale_
_following: "weakref.WeakSet[ModelWatch]" = weakref.WeakSet()


def _unscale_and_look(scaler: GradScaler, optimizer: Optimizer) -> None:
    """Replaces GradScaler.unscale_, as GradScaler.step() skips the optimizer if gradients are not finite."""
    _unscale(scaler, optimizer)
    for watch in list(_following):
        watch.look_unscaled(scaler, optimizer)


def _unwrap(optimizer: Any) -> Any:  # noqa: ANN401 - an optimizer, or accelerate's wrapper of one
    return getattr(optimizer, "optimizer", optimizer)


class ModelWatch:
    """Watches a model until `remove` or the end of the `with` block. See `watch_model`."""

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
        """Add the hooks; a disabled scaler counts as none."""
        self.optimizer, self.dump = optimizer, dump
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.next_step = self._first_step = first_step
        self.last: StepReport | None = None
        self.measurement = Measurement(model, find_parameters(model, optimizer), config)
        self._log = StepLog(log, config)
        self._loss: Tensor | float | None = None
        self.share_factor = 1  # of losses that are shares: processes that Trainer averages tokens over
        self._by_hand = False  # the loop calls step(); nothing else marks a step
        self._stepped = False  # an optimizer has made a step
        self._unscaled: set[int] = set()  # ids of optimizers whose unscaled gradients have been measured
        # Ids of the optimizers that have stepped in this step, and in any.
        self._in_step: set[int | None] = set()
        self._known: set[int | None] = set()
        self._awaited: Callable[[], object] = lambda: None  # reference to the callback of a backward pass that runs
        # Norms at the end of the last backward pass, and (id, version) of each gradient to detect changes.
        self._held: tuple[Tensor, dict[str, tuple[int, int] | None]] | None = None
        self._undo = ExitStack()
        self._heard: set[str] = set()  # parameters with a hook
        _following.add(self)
        try:
            self._add_hooks(model)
            if dump is not None:
                dump.__enter__()
        except BaseException:
            self.remove()
            raise
        if not any(parameter.requires_grad for parameter in self.measurement.parameters.values()):
            logger.warning("no parameter requires a gradient: only outputs and the loss are watched")

    def _add_hooks(self, model: nn.Module) -> None:
        self._undo.callback(on_each_step(self.look_before_step).remove)
        for handle in self.measurement.add_hooks():
            self._undo.callback(handle.remove)
        if not isinstance(model, torch.jit.ScriptModule):
            self._undo.callback(model.register_forward_pre_hook(OwnHook(self._begin)).remove)
            self._undo.callback(model.register_forward_hook(OwnHook(self._end), with_kwargs=True).remove)
        self._listen()
        GradScaler.unscale_ = _unscale_and_look  # type: ignore[method-assign, assignment]

    def _listen(self) -> None:
        """Add hooks to trained parameters, also to those that were frozen at the last call."""
        ours = weakref.ref(self)
        for name, parameter in self.measurement.parameters.items():
            if parameter.requires_grad and parameter.is_leaf and name not in self._heard and not is_lazy(parameter):
                handle = parameter.register_post_accumulate_grad_hook(
                    lambda _: (watch := ours()) and watch._await_end()  # type: ignore[func-returns-value]
                )
                self._heard.add(name)
                self._undo.callback(handle.remove)

    def note_loss(self, loss: Tensor | float) -> None:
        """Record the loss if `step` is not called; a `loss` among the model's outputs is recorded automatically."""
        if isinstance(loss, Tensor) and loss.numel() != 1:
            raise ConfigError(
                f"a loss of shape {tuple(loss.shape)} is no single number", where="watch_model", do="loss.mean()"
            )
        self._loss = loss.detach().reshape(()) if isinstance(loss, Tensor) else loss

    def step(self, loss: Tensor | float | None = None) -> StepReport:
        """Judge gradients after unscaling and before clipping. Raises ConfigError: the optimizer is followed."""
        if self.optimizer is not None:
            what = "the optimizer marks the steps: step() would look at its gradients twice"
            do = "watch.note_loss(loss), or leave out optimizer="
            raise ConfigError(what, where="watch_model(optimizer=...)", do=do)
        self._by_hand = True
        if loss is not None:
            self.note_loss(loss)
        report = self._measure(self._scale())
        self._held = None
        self.measurement.forget_outputs()
        return report

    def _scale(self) -> Tensor | None:
        """The scaler's loss scale; does not wait for the device."""
        return None if self.scaler is None else self.scaler.scale(torch.ones((), device=self.measurement.device))

    def _measure(self, scale: Tensor | None = None, *, optimizer: int | None = None, **how: Any) -> StepReport:  # noqa: ANN401 - arguments of read
        joins = bool(self._in_step) and optimizer not in self._in_step  # the step that another optimizer began
        if not joins or not (optimizer in self._known or self.next_step == self._first_step + 1):
            joins, self._in_step = False, set()
            self.next_step += 1
        self._in_step.add(optimizer)
        self._known.add(optimizer)
        report = self.measurement.read(self.next_step - 1, self._loss, scale, optimizer=optimizer, **how)
        self.last, self._loss = report, None
        self._log.write(report)
        bad = any(anomaly.severity == SEVERE for anomaly in report.anomalies)
        if self.dump is not None and (bad or not joins):
            self.dump.step(float("nan") if bad else 0.0)
        self._listen()
        return report

    def _begin(self, *_: Any) -> None:  # noqa: ANN401 - the signature of the hook
        """At a forward pass: measured gradients that changed without an optimizer's step were a manual step."""
        if not in_training_pass():
            return
        self.measurement.calls.clear()
        self._listen()
        if self._held is not None and not self._stepped and self._held[1] != self._gradients():
            self._measure(norms_P=self._held[0])
            self._held = None

    def _end(self, _model: nn.Module, _inputs: Any, named: Mapping[str, Any], output: Any) -> None:  # noqa: ANN401
        """Record the loss. Trainer names the tokens of the whole step: then each pass computes a share of its loss."""
        if self._by_hand or not in_training_pass():
            return
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if isinstance(loss, Tensor) and loss.numel() == 1:
            if named.get("num_items_in_batch") is not None:
                before = 0 if self._loss is None else self._loss
                loss = before + self.share_factor * loss.detach().reshape(())
            self.note_loss(loss)

    def _await_end(self) -> None:
        """When the first gradient of a backward pass is there: have the norms measured at the end of the pass."""
        if self._awaited() is None:
            queue = torch.autograd.Variable._execution_engine.queue_callback

            def end() -> None:
                queue(self._hold)  # queued twice: runs after DistributedDataParallel's own callback

            # A backward pass that raises frees its callbacks.
            self._awaited = weakref.ref(end)
            queue(end)

    @torch.no_grad()
    def _hold(self) -> None:
        if not self._by_hand and self.scaler is None and self.measurement.parameters:
            self._held = gradient_norms([*self.measurement.parameters.values()]), self._gradients()

    def _gradients(self) -> dict[str, tuple[int, int] | None]:
        grads = {name: parameter.grad for name, parameter in self.measurement.parameters.items()}
        return {name: None if grad is None else (id(grad), grad._version) for name, grad in grads.items()}

    def _names_of(self, optimizer: Any) -> set[str]:  # noqa: ANN401 - or a wrapper of one
        """Names of the optimizer's watched parameters; empty if the optimizer is not followed."""
        if self._by_hand or (self.optimizer is not None and _unwrap(optimizer) is not _unwrap(self.optimizer)):
            return set()
        asked = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        ours = self.measurement.parameters.items()
        return {name for name, parameter in ours if parameter.requires_grad and id(parameter) in asked}

    def look_unscaled(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """Judge an optimizer's gradients after GradScaler.unscale_."""
        if scaler.is_enabled() and (names := self._names_of(optimizer)):
            self.scaler, self._stepped = scaler, True
            self._held = None  # norms of scaled gradients
            plain = id(_unwrap(optimizer))
            self._unscaled.add(plain)
            self._measure(self._scale(), only=names, optimizer=plain)

    def look_before_step(self, optimizer: Optimizer) -> None:
        """Judge gradients before an optimizer's step; they may have been clipped since the backward pass."""
        if not (names := self._names_of(optimizer)) or id(optimizer) in self._unscaled:
            self._unscaled.discard(id(optimizer))
            return
        self._stepped = True
        if in_backward():  # one optimizer per parameter, which steps as soon as its gradient is there
            self.measurement.with_gradient.update(names)
            return
        # Fused optimizers unscale inside their step.
        scale = getattr(optimizer, "grad_scale", None)
        norms_P, then = self._held or (None, {})
        parameters = self.measurement.parameters
        if scale is not None or any((then.get(name) is None) != (parameters[name].grad is None) for name in names):
            norms_P = None  # of other gradients
        self._measure(scale, scaled=scale is not None, norms_P=norms_P, only=names, optimizer=id(optimizer))

    def remove(self) -> None:
        """Remove all hooks; results stay. Gradients that no step has used yet are judged."""
        if self not in _following:
            return
        if self._held is not None and not self._stepped and not self._by_hand:
            self._measure(norms_P=self._held[0])
        self._undo.close()
        _following.discard(self)
        if not _following:
            GradScaler.unscale_ = _unscale  # type: ignore[method-assign]
        for anomaly in self.measurement.name_without_gradient(1):
            logger.warning("step %d: %s", self.next_step - 1, anomaly.message)

    def __enter__(self) -> "ModelWatch":
        """Return self; the hooks exist already."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        """Remove the hooks and end the dump."""
        self.remove()
        dump, self.dump = self.dump, None
        if dump is not None:
            dump.__exit__(kind, *details)


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
    """Watch gradients, outputs and the loss scale of a model in training; its results do not change.

    An earlier watch of the same model ends, unless each has an optimizer of its own.

    Args:
        model: parameters are left out while they are frozen, tied ones counted once.
        optimizer: the only one to follow. None: all that have parameters of the model, until `step` is called.
        scaler: its scale is judged as well; not needed if an optimizer is followed.
        config: thresholds.
        log: file of JSON lines, one per step; processes after the first add their rank to its name, watch-1.jsonl.
        dump: folder for the tensors of the last steps before a severe finding, written by `instruments.tensor_dump`.
        dump_steps: number of these steps.
        first_step: number of the first step, for a resumed run.
    Raises:
        ConfigError: the model is sharded in a way that hides its layers.
    """
    for old in [one for one in _following if one.measurement.model is model]:
        if old.optimizer is None or optimizer is None or old.optimizer is optimizer:
            logger.warning("the model is watched already: the earlier watch ends at step %d", old.next_step)
            old.__exit__(None)
    tensors = None if dump is None else _dump_into(Path(dump), model, dump_steps)
    log = None if log is None else Path(log)
    return ModelWatch(model, optimizer, scaler, config or WatchConfig(), log, tensors, first_step)


def _dump_into(folder: Path, model: nn.Module, steps: int) -> "TensorDump":
    # Without a dump, only torch is needed.
    from instruments.tensor_dump.config import DumpConfig  # noqa: PLC0415
    from instruments.tensor_dump.tensor_dump import TensorDump  # noqa: PLC0415

    return TensorDump(model, folder, DumpConfig(last_steps=steps), environment={})
