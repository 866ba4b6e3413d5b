"""Watch a model during training: hooks on the model and on the optimizers that are given, on nothing else.

Gradient norms are measured at the end of each backward pass: before unscaling and clipping, and multiplied by the loss
scale of that moment. They are judged when a given optimizer has stepped, when the loop calls `watch.step`, or else at
the next forward pass, if the gradients have changed until then: by a step of an optimizer that was not given, by hand,
or because a scaler skipped the step. While a model is watched, torch.autograd.backward notes the loss it starts from.
"""

import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from instruments.errors import ConfigError, NumericsError
from instruments.hooks import OwnHook, in_backward, in_training_pass
from instruments.tensors import is_sharded
from instruments.training_watch.measurement import Measurement, gradient_norms
from instruments.training_watch.step_log import SEVERE, Sink, StepLog, StepReport, WatchConfig

logger = logging.getLogger(__name__)

LOG, RAISE = "log", "raise"


@dataclass
class _Held:
    """Norms at the end of a backward pass."""

    norms_P: Tensor
    scale: Tensor | None  # loss scale; None without a scaler
    gradients: dict[str, tuple[int, int] | None]  # id and version of each gradient, to detect changes
    weights: dict[str, int]  # version of each parameter, to detect steps
    judged: set[int | None] = field(default_factory=set)  # ids of the optimizers whose step was judged by them
    noted: bool = False  # whether they were zeroed is known


class ModelWatch:
    """Watches a model until `remove` or the end of the `with` block. See `watch_model`."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Any],
        scaler: GradScaler | None,
        config: WatchConfig,
        log: Sink,
        first_step: int,
        on_severe: str = LOG,
    ) -> None:
        """Add the hooks."""
        self.on_severe = on_severe
        self.optimizers, self.scaler = optimizers, scaler
        self.next_step = first_step
        self.last: StepReport | None = None
        self.measurement = Measurement(model, config)
        self._log = StepLog(log, config)
        self._roots: list[Tensor] = []  # losses of the backward pass that runs
        self._root_loss: Tensor | None = None  # their sum since the last step
        self._in_step: set[int] = set()  # ids of the optimizers that have stepped in this step
        self._held: _Held | None = None
        self._by_hand = False  # the loop calls `step`
        self._awaited: Callable[[], object] = lambda: None  # reference to the callback of a backward pass that runs
        self._hooks, self._optimizer_hooks = ExitStack(), ExitStack()
        self._hooked: set[str] = set()  # parameters with a hook
        _OPEN.add(self)
        _note_losses()
        weakref.finalize(self, _note_losses)  # a watch that is forgotten puts torch.autograd.backward back, too
        self._add_hooks(model)
        if not any(parameter.requires_grad for parameter in self.measurement.parameters.values()):
            logger.warning("no parameter requires a gradient: only outputs and the loss are watched")

    def _add_hooks(self, model: nn.Module) -> None:
        for handle in self.measurement.add_hooks():
            self._hooks.callback(handle.remove)
        if not isinstance(model, torch.jit.ScriptModule):
            self._hooks.callback(model.register_forward_pre_hook(OwnHook(self._begin)).remove)
        for optimizer in self.optimizers:
            self._optimizer_hooks.callback(optimizer.register_step_post_hook(self._after_step).remove)
            if not self._names_of([optimizer]):
                logger.warning("no parameter of the optimizer is one of the model's: its steps are not watched")
        self._hook_parameters()

    def _hook_parameters(self) -> None:
        """Add hooks to trained parameters, also to those that were frozen at the last call."""
        ours = weakref.ref(self)
        for name, parameter in self.measurement.parameters.items():
            if parameter.requires_grad and parameter.is_leaf and name not in self._hooked and not is_lazy(parameter):

                def arrived(_: Tensor, name: str = name) -> None:
                    if (watch := ours()) is not None:
                        watch._await_end(name)

                self._hooked.add(name)
                self._hooks.callback(parameter.register_post_accumulate_grad_hook(arrived).remove)

    def step(
        self,
        optimizer: Optimizer | None = None,
        scaler: GradScaler | None = None,
        *,
        loss: Tensor | float | None = None,
    ) -> StepReport:
        """Judge the gradients of the last backward pass, before the optimizer's step.

        After the first call, the steps of optimizers that `watch_model` was given are no longer followed.

        Args:
            optimizer: if there are several: the one that steps now; only its parameters are judged.
            scaler: the GradScaler that has scaled the loss, before `scaler.update()`.
            loss: not scaled; None: the sum of what `backward` was called on.
        """
        self._by_hand = True
        self._optimizer_hooks.close()
        self.scaler = scaler or _scaler_of(optimizer) or self.scaler
        if isinstance(loss, Tensor) and loss.numel() != 1:
            what = f"a loss of shape {tuple(loss.shape)} is no single number"
            raise ConfigError(what, where="watch_model", do="loss.mean()")
        loss = loss.detach().reshape(()) if isinstance(loss, Tensor) else loss
        return self._judge(None if optimizer is None else _unwrap(optimizer), loss)

    def _scale(self) -> Tensor | None:
        """The scaler's loss scale, None without one; does not wait for the device."""
        if self.scaler is None or not self.scaler.is_enabled():
            return None
        return self.scaler.scale(torch.ones((), device=self.measurement.device))

    def _judge(self, optimizer: Optimizer | None, loss: Tensor | float | None = None) -> StepReport:
        """Several optimizers may step after the same pass; a step ends when one of them steps again."""
        key = None if optimizer is None else id(optimizer)
        joins = key is not None and bool(self._in_step) and key not in self._in_step
        if not joins:
            self._in_step.clear()
            self.next_step += 1
        if key is not None:
            self._in_step.add(key)
        stepping = self.optimizers if optimizer is None else [optimizer]
        names, held = self._names_of(stepping), self._held
        if held is not None and (key in held.judged or self._are_others(held, names)):
            held = None
        scale = self._scale() if held is None or held.scale is None else held.scale
        norms_P = None if held is None else held.norms_P
        if loss is None and self._root_loss is not None:
            loss = self._root_loss if scale is None else self._root_loss / scale
        followed = self._names_of([*self.optimizers, *stepping]) if stepping else set()
        self.measurement.note_steps(followed, stepping)
        report = self.measurement.read(self.next_step - 1, loss, scale, norms_P, only=names, optimizer=key)
        if self._held is not None:
            self._held.judged.add(key)
        self.last, self._root_loss = report, None
        self._log.write(report)
        self._hook_parameters()
        severe = [anomaly for anomaly in report.anomalies if anomaly.severity == SEVERE]
        if severe and self.on_severe == RAISE:
            where = f"step {report.step}, {', '.join(severe[0].where[:3]) or 'the whole model'}"
            raise NumericsError(severe[0].message, where=where, do="on_severe='log' only logs it")
        return report

    def enter_backward(self, roots: Sequence[object]) -> None:
        """A backward pass begins at these tensors."""
        parameters = [*self.measurement.parameters.values()]
        if all(parameter.grad is None for parameter in parameters):  # an earlier pass was an evaluation only
            self._root_loss = None
        if (held := self._held) is not None:
            counts = bool(held.judged) and not held.noted
            held.noted |= counts
            self.measurement.note_zeroed(held.norms_P, counts=counts)
        # A scaled float16 loss may overflow although the loss is finite.
        unsure = torch.float16 if self._scale() is not None else None
        known = [
            root.detach() for root in roots
            if isinstance(root, Tensor) and root.numel() == 1 and root.dtype != unsure and not is_sharded(root)
        ]  # fmt: skip
        self._roots = known if len(known) == len(roots) else []

    @torch.no_grad()
    def _add_roots(self) -> None:
        """Add the losses of this backward pass, still scaled."""
        roots, self._roots = self._roots, []
        if roots:
            loss = torch.stack([root.to(self.measurement.device, torch.float32).reshape(()) for root in roots]).sum()
            self._root_loss = loss if self._root_loss is None else self._root_loss + loss

    def _are_others(self, held: _Held, names: set[str]) -> bool:
        """Whether gradients were given to parameters that had none: not those of a backward pass."""
        parameters = self.measurement.parameters
        return any(held.gradients.get(name) is None and parameters[name].grad is not None for name in names)

    def _begin(self, *_: Any) -> None:  # noqa: ANN401 - the signature of the hook
        """At a forward pass: gradients that changed and were not judged have been used in a step."""
        if not in_training_pass():
            return
        self.measurement.calls.clear()
        self._hook_parameters()
        held = self._held
        if held and (held.gradients != self._gradients() or held.weights != self.measurement.versions()):
            self._judge_unseen_step()

    def _judge_unseen_step(self) -> None:
        """Judge gradients that were not; if the optimizers are given, only a scaler can have left their step out."""
        followed = self._by_hand or (self.optimizers and self.scaler is None)
        if self._held is not None and not self._held.judged and not followed:
            self._judge(None)

    def _await_end(self, name: str) -> None:
        """A gradient is there; the first one of a backward pass has the norms measured at its end."""
        self.measurement.with_gradient.add(name)
        if self._awaited() is None:
            queue = torch.autograd.Variable._execution_engine.queue_callback

            def end() -> None:
                queue(self._hold)  # queued twice: runs after DistributedDataParallel's own callback

            # A backward pass that raises frees its callbacks.
            self._awaited = weakref.ref(end)
            queue(end)

    @torch.no_grad()
    def _hold(self) -> None:
        norms_P = gradient_norms([*self.measurement.parameters.values()])
        self.measurement.sample_weights(stepped=self._held is not None and bool(self._held.judged))
        self._held = _Held(norms_P, self._scale(), self._gradients(), self.measurement.versions())
        self._add_roots()

    def _gradients(self) -> dict[str, tuple[int, int] | None]:
        grads = {name: parameter.grad for name, parameter in self.measurement.parameters.items()}
        return {name: None if grad is None else (id(grad), grad._version) for name, grad in grads.items()}

    def _names_of(self, optimizers: Sequence[Any]) -> set[str]:
        """Names of the optimizers' parameters; of all parameters if there is no optimizer."""
        asked = {id(one) for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]}
        return {name for name, one in self.measurement.parameters.items() if not optimizers or id(one) in asked}

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        # An optimizer for each parameter steps as soon as its gradient is there.
        if not in_backward() and self._names_of([optimizer]):
            self._judge(optimizer)

    def remove(self) -> None:
        """Remove all hooks; results stay. Gradients that no step has used yet are judged."""
        if self not in _OPEN:
            return
        try:
            self._judge_unseen_step()
        finally:
            self._hooks.close()
            self._optimizer_hooks.close()
            _OPEN.discard(self)
            _note_losses()
        for anomaly in self.measurement.name_without_gradient(1):
            logger.warning("step %d: %s", self.next_step - 1, anomaly.message)

    def __enter__(self) -> "ModelWatch":
        """Return self; the hooks exist already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the hooks."""
        self.remove()


_OPEN: "weakref.WeakSet[ModelWatch]" = weakref.WeakSet()


_noting: Callable[..., None] | None = None  # what we have put in the place of torch.autograd.backward
_replaced = torch.autograd.backward


def _note_losses() -> None:
    """While a model is watched, torch.autograd.backward, which Tensor.backward calls, tells what it starts from."""
    global _noting, _replaced
    watched = bool([*_OPEN])  # a set of weak references may still count one that dies now
    if watched and torch.autograd.backward is not _noting:
        replaced = torch.autograd.backward

        def noting(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - the arguments of torch.autograd.backward
            if noting is _noting and not in_backward():  # else other code has wrapped it, and a newer one tells
                tensors = args[0] if args else kwargs.get("tensors", ())
                for watch in [*_OPEN]:
                    watch.enter_backward([tensors] if isinstance(tensors, Tensor) else [*tensors])
            replaced(*args, **kwargs)

        _replaced, _noting, torch.autograd.backward = replaced, noting, noting
    elif not watched and torch.autograd.backward is _noting:
        torch.autograd.backward = _replaced


def _unwrap(optimizer: Any) -> Any:  # noqa: ANN401 - an optimizer, or accelerate's wrapper of one
    return getattr(optimizer, "optimizer", optimizer)


def _scaler_of(optimizer: Any) -> GradScaler | None:  # noqa: ANN401 - an optimizer, or accelerate's wrapper of one
    scaler = getattr(optimizer, "scaler", None)
    return scaler if isinstance(scaler, GradScaler) else None


def watch_model(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    scaler: GradScaler | None = None,
    config: WatchConfig | None = None,
    *,
    log: Sink = None,
    first_step: int = 0,
    on_severe: str = LOG,
) -> ModelWatch:
    """Watch gradients, outputs and the loss scale of a model in training; its results do not change.

    An earlier watch of the same model ends.

    Args:
        model: parameters are left out while they are frozen, tied ones counted once.
        optimizer: whose steps are followed, one or several; a loop may call `watch.step` instead.
        scaler: the GradScaler that scales the loss, None: that of accelerate's optimizer; its scale is judged as well.
        config: thresholds, and how often outputs are watched.
        log: file of JSON lines, one per step; processes after the first add their rank to its name, watch-1.jsonl. Or
            a SummaryWriter of TensorBoard, or a run of Weights & Biases.
        first_step: number of the first step, for a resumed run.
        on_severe: log, or raise: NumericsError at a step with a severe finding.
    Raises:
        ConfigError: the model is sharded in a way that hides its layers, every_steps below 1, a log of another kind,
            another word for `on_severe`, or an optimizer without hooks.
    """
    if on_severe not in {LOG, RAISE}:
        raise ConfigError(
            f"on_severe={on_severe!r} is none of {LOG}, {RAISE}", where="watch_model", do="on_severe='raise'"
        )
    given = optimizer if isinstance(optimizer, Sequence) else [] if optimizer is None else [optimizer]
    optimizers = [_unwrap(one) for one in given]
    scaler = scaler or next(filter(None, map(_scaler_of, given)), None)
    if bare := [type(one).__name__ for one in optimizers if not hasattr(one, "register_step_post_hook")]:
        what = f"{', '.join(bare)} has no hooks for its steps"
        raise ConfigError(what, where="watch_model", do="watch_model(model), and watch.step() before optimizer.step()")
    for old in [one for one in _OPEN if one.measurement.model is model]:
        logger.warning("the model is watched already: the earlier watch ends at step %d", old.next_step)
        old.remove()
    return ModelWatch(model, optimizers, scaler, config or WatchConfig(), log, first_step, on_severe)
