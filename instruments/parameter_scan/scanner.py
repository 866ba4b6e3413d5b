"""Measure the norms of a running model's weight inputs and gradients, per sample and block.

The model's results do not change: logits, losses, gradients and `generate()` are bitwise the same. Weights may be
frozen, trained or quantised, with checkpointing, autocast or gradient accumulation. Gradients are those of the loss on
which `backward` is called: a divided or scaled loss gives divided or scaled norms.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from instruments.errors import ConfigError, some
from instruments.hooks import EagerHook, in_transform
from instruments.parameter_scan.call import bind_arguments, read_call, replace_argument
from instruments.parameter_scan.module_hooks import TargetHooks
from instruments.parameter_scan.parameters import WatchedParameter
from instruments.parameter_scan.record import to_record
from instruments.parameter_scan.scan_pass import Passes, ScanPass
from instruments.parameter_scan.targets import ScanRecord, Selection, Target, refusal, warn_left_out

logger = logging.getLogger(__name__)

_SCANNED: WeakSet[nn.Module] = WeakSet()
_PRODUCTS = ("auto", "gram", "direct")


# Results that carry no gradient to the weight.
_WITHOUT_GRADIENT = {Tensor.detach, Tensor.data.__get__, Tensor.grad.__get__}  # type: ignore[attr-defined, union-attr]


class WeightUses(TorchFunctionMode):
    """While entered, notes every function that uses a watched weight outside its module, such as a tie by F.linear."""

    def __init__(self, targets: Sequence[Target]) -> None:
        """Watch the weights of Linear layers, Conv1D and embeddings."""
        super().__init__()
        self.found: dict[Target, str] = {}  # target → function
        self._targets = [target for target in targets if not target.fused]
        self._weights: dict[int, tuple[Tensor, Target]] = {}  # by id: the weight, kept alive, and its target
        self._running: set[Target] = set()  # those whose module runs
        self._entered = False

    def install(self) -> Iterator[RemovableHandle]:
        """Hooks on the modules, whose own use of the weight is not noted."""
        for target in self._targets:
            for module in filter(None, (target.module, target.head)):
                begin = EagerHook(lambda *_, own=target: self._running.add(own))
                end = EagerHook(lambda *_, own=target: self._running.discard(own))
                yield module.register_forward_pre_hook(begin)
                yield module.register_forward_hook(end, always_call=True)

    def begin(self) -> None:
        """A forward pass begins."""
        self.found, self._running = {}, set()
        weights = ((target.module._parameters.get("weight"), target) for target in self._targets)
        self._weights = {id(weight): (weight, target) for weight, target in weights if weight is not None}
        if self._targets and not self._entered:  # a pass may have been interrupted
            self.__enter__()
            self._entered = True

    def end(self) -> Mapping[Target, str]:
        """The pass ends: the functions that used each target's weight outside its module."""
        if self._entered:
            self.__exit__(None, None, None)
            self._entered, self._weights = False, {}
        return self.found

    def __torch_function__(
        self, func: Callable[..., Any], _types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # noqa: ANN401 - any result of the function
        result = func(*args, **(kwargs or {}))
        if not torch.compiler.is_compiling():
            for value in _flat((*args, *(kwargs or {}).values())):
                weight, target = self._weights.get(id(value), (None, None))
                if target is None or value is not weight or target in self._running or func in _WITHOUT_GRADIENT:
                    continue
                tensors = (one for one in _flat([result]) if isinstance(one, Tensor))
                if any(one is not weight and one.is_floating_point() for one in tensors):
                    self.found[target] = getattr(func, "__name__", str(func))
        return result


def _flat(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value


class ParameterTensorScanner:
    """Exact per-sample norms of every watched weight's input and gradient.

    Args:
        model: its forward takes input_ids or inputs_embeds, and attention_mask if there is padding.
        patterns: globs on module names; None for every Linear, Conv1D, embedding and fused expert. `left_out` then
            gives the weights without norms and the reasons, also those found during a pass, such as a second use.
        block_width: rows and columns of a block; where features are attention heads, a block is a head.
        per_token: also measure ‖x_t‖ and ‖x_t‖·‖δ_t‖, the norm of position t's contribution to the weight's gradient
            (not the gradient of token t's own loss).
        gradients: True records backward passes, and no forward pass under no_grad. False records forward passes alone,
            under no_grad or not; gradients are then NaN.
        sink: called with each record at the next forward pass and at exit; without it, records wait for `collect`.
        product: gram, direct, or auto for the cheaper one; both are exact.
    Raises:
        ConfigError: no parameter matches, a requested one cannot be scanned, or (on entering) the model is already
            being scanned.
    """

    def __init__(
        self,
        model: nn.Module,
        patterns: Sequence[str] | None = None,
        block_width: int = 64,
        per_token: bool = False,
        gradients: bool = True,
        sink: Callable[[ScanRecord], None] | None = None,
        product: str = "auto",
    ) -> None:
        """Find the weights to watch; the model is changed only on entering."""
        if product not in _PRODUCTS:
            raise refusal(f"product={product!r} is none of {', '.join(_PRODUCTS)}", "product='auto'")
        self._model: nn.Module | None = model
        selection = Selection(model, patterns, block_width)
        self._targets: Sequence[Target] = selection.targets
        self.left_out = selection.left_out
        self.parameters: list[WatchedParameter] = [one for target in self._targets for one in target.parameters]
        self.skipped: list[str] = []  # samples without a supervised token
        self._per_token, self._gradients, self._sink, self._product = per_token, gradients, sink, product
        self._passes = Passes(gradients=gradients, strict=selection.strict, left_out=self.left_out)
        self._uses = WeightUses(self._targets if gradients else ())
        self._handles: list[RemovableHandle] = []
        self._records: list[ScanRecord] = []
        self._measured: set[int] = set()  # parameters with norms in any pass
        self._names: Sequence[str] | None = None
        self._source = ""
        self._step = 0

    def __enter__(self) -> "ParameterTensorScanner":
        if self._model is None:
            raise refusal("this scanner has ended", "make a new one: ParameterTensorScanner(model)")
        modules = {self._model, *(target.module for target in self._targets)}
        if modules & set(_SCANNED):
            do = "leave the first `with` block before the next, or watch all in one: patterns=[...]"
            raise refusal("the model is being scanned already", do)
        _SCANNED.update(modules)
        hooks = (TargetHooks(target, self._passes, self._product) for target in self._targets)
        self._handles = [
            self._model.register_forward_pre_hook(EagerHook(self._begin), with_kwargs=True),
            *(handle for own in hooks for handle in own.install()),
            *self._uses.install(),
            self._model.register_forward_hook(EagerHook(self._end), always_call=True),
        ]
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        """Remove all hooks; finished records stay on the CPU until they are collected."""
        for handle in self._handles:
            handle.remove()
        _SCANNED.difference_update({self._model, *(target.module for target in self._targets)})
        self._uses.end()
        self._passes.close()
        try:
            if kind is None:
                self._deliver()
                self._records = self.collect()
                self._note_unmeasured()
        finally:
            self._model, self._targets, self._handles, self._uses = None, (), [], WeightUses(())
            self._passes.finished.clear()

    def _note_unmeasured(self) -> None:
        """At the end: add the weights that have no norms in any pass to `left_out`."""
        why = "its module did not run, or no gradient reached it" if self._gradients else "its module did not run"
        silent = [target for target in self._targets if self._measured.isdisjoint(target.columns)]
        found = {one.name: why for own in silent if own.label not in self.left_out for one in own.parameters}
        if self._measured:
            self.left_out |= found
            warn_left_out(found)

    def name_samples(self, names: Sequence[str], source: str = "") -> None:
        """Name the samples of the next recorded forward pass, and their source."""
        self._names, self._source = list(names), source

    def collect(self) -> list[ScanRecord]:
        """Records of all passes finished since the last call: backward passes, or forward passes with gradients=False.

        Raises NumericsError: a sample's gradients are missing, all zero or not finite; its pass is dropped.
        """
        records, self._records = self._records, []
        while self._passes.finished:
            scan_pass, squares = self._passes.finished.popleft()
            self._measured |= set(squares.out_gradient if self._gradients else squares.activation)
            record, skipped = to_record(scan_pass, squares, self.parameters, gradients=self._gradients)
            if skipped and not self.skipped:
                logger.warning("parameter scan: samples without a supervised token are skipped: %s", some(skipped))
            self.skipped += skipped
            if record is not None:
                records.append(record)
        return records

    def _deliver(self) -> None:
        if self._sink is not None:
            for record in self.collect():
                self._sink(record)

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Hook before the model's forward."""
        if self._passes.recomputed():
            return None  # recomputation: its modules use the pass of the backward pass
        self._deliver()
        self._passes.begin(None)
        if (self._gradients and not torch.is_grad_enabled()) or in_transform():
            return None
        arguments = bind_arguments(model, args, kwargs)
        config = getattr(model, "config", None)
        facts = read_call(arguments, encoder_decoder=getattr(config, "is_encoder_decoder", False) is True)
        if not facts.samples * facts.length:
            return None  # an empty batch
        self._step += 1
        names = self._names or [f"step {self._step}, sample {sample + 1}" for sample in range(facts.samples)]
        if len(names) != facts.samples:
            raise ConfigError(
                f"{len(names)} names for {facts.samples} samples", where="scanner.name_samples", do="name every sample"
            )
        self._passes.begin(ScanPass(facts, names, self._source, self._per_token))
        self._names, self._source = None, ""
        self._uses.begin()
        embeds = arguments.get("inputs_embeds") if self._gradients else None
        if not isinstance(embeds, Tensor) or embeds.requires_grad:
            return None
        # With frozen weights the graph reaches the layers only if the inputs require a gradient.
        return replace_argument(model, args, kwargs, "inputs_embeds", embeds.detach().requires_grad_())

    def _end(self, _model: nn.Module, _args: tuple[Any, ...], output: object) -> None:
        """Hook after the model's forward, also after a failed one (output None)."""
        for target, function in self._uses.end().items():
            self._passes.leave_out(target, f"{function} uses it outside its module")
        self._passes.end(output)
