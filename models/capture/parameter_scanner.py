"""Watch the weights of a running model: norms of their inputs and of their gradients, by sample and block.

    with ParameterTensorScanner(model) as scanner:
        for batch in batches:
            model(**batch).loss.backward()
            for record in scanner.collect():
                ...

Nothing the model computes changes: logits, losses, gradients and `generate()` are bit for bit what they are without it.
Weights may be frozen, training or quantised; checkpointing, autocast and gradient accumulation are the caller's choice.
A gradient is that of whatever `backward` was called on: a loss divided or scaled gives norms divided or scaled.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from models.capture.parameters import measure
from models.capture.parameters.call import bind_arguments, read_call
from models.capture.parameters.inputs import InputSquares
from models.capture.parameters.layout import Layout
from models.capture.parameters.scan_pass import ScanPass
from models.capture.parameters.targets import Target, find_targets
from models.capture.parameters.transfer import Measured, to_record
from models.capture.records import ScanRecord, WatchedParameter
from models.capture.watch import watch
from models.errors import ConfigError, NumericsError

_SCANNED: WeakSet[nn.Module] = WeakSet()
_PRODUCTS = ("auto", "gram", "direct")


class ParameterTensorScanner:
    """Exact per-sample norms of every watched weight's input and gradient.

    Args:
        model: whose forward takes input_ids or inputs_embeds, and attention_mask where there is padding.
        patterns: globs on module names; None for attention and FFN projections and the input embedding.
        block_width: rows and columns of a block.
        per_token: also ‖x_t‖ and ‖x_t‖·‖δ_t‖, the norm of what position t contributes to the weight's gradient. That is
            not the gradient of token t's own loss.
        gradients: False for forward passes alone, under no_grad or not; gradients are then NaN. True records backward
            passes, and nothing of a forward pass under no_grad.
        sink: called with each record at the next forward pass and at exit; without one, records wait for `collect`.
        product: gram, direct, or auto for the cheaper one; both are exact.
    Raises:
        ConfigError: no parameter matches, or (on entering) the model is being scanned already.
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
        """Find what to watch; the model is touched only on entering."""
        if product not in _PRODUCTS:
            raise ConfigError(
                f"product={product!r} is none of {', '.join(_PRODUCTS)}",
                where="ParameterTensorScanner",
                do="product='auto'",
            )
        self._model: nn.Module | None = model
        self._targets: Sequence[Target] = find_targets(model, patterns, block_width)
        self.parameters: list[WatchedParameter] = [target.parameter for target in self._targets]
        self.skipped: list[str] = []  # samples without a supervised token
        self._layout = Layout.of(self.parameters)
        self._per_token, self._gradients, self._sink, self._product = per_token, gradients, sink, product
        self._handles: list[RemovableHandle] = []
        self._running: ScanPass | None = None  # whose forward pass is under way
        self._entered: list[ScanPass] = []  # which the backward pass under way has reached
        self._finished: deque[Measured] = deque()
        self._records: list[ScanRecord] = []
        self._last_input: tuple[ScanPass, InputSquares] | None = None
        self._names: Sequence[str] | None = None
        self._source = ""
        self._step = 0

    def __enter__(self) -> "ParameterTensorScanner":
        """Put the hooks on the model."""
        if self._model is None:
            raise ConfigError(
                "this scanner has ended",
                where="ParameterTensorScanner",
                do="make a new one: ParameterTensorScanner(model)",
            )
        modules = {self._model, *(target.module for target in self._targets)}
        if modules & set(_SCANNED):
            raise ConfigError(
                "the model is being scanned already",
                where="ParameterTensorScanner",
                do="leave the first `with` block before the next, or watch all in one: patterns=[...]",
            )
        _SCANNED.update(modules)
        self._handles = [
            self._model.register_forward_pre_hook(self._begin, with_kwargs=True),
            self._model.register_forward_hook(self._end, always_call=True),
        ]
        for index, target in enumerate(self._targets):
            hook = self._on_linear if target.parameter.kind == "linear" else self._on_embedding
            self._handles.append(target.module.register_forward_hook(partial(hook, index), with_kwargs=True))
            if target.head is not None:
                self._handles.append(target.head.register_forward_hook(partial(self._on_head, index), with_kwargs=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take every hook off; keep what was measured, on the CPU, until it is collected."""
        for handle in self._handles:
            handle.remove()
        _SCANNED.difference_update({self._model, *(target.module for target in self._targets)})
        self._model, self._targets, self._handles = None, (), []
        self._running, self._entered, self._last_input = None, [], None
        if kind is None:
            self._deliver()
            self._records = self.collect()
        self._finished.clear()

    def name_samples(self, names: Sequence[str], source: str = "") -> None:
        """Name the samples of the next forward pass that is recorded, and where they come from."""
        self._names, self._source = list(names), source

    def collect(self) -> list[ScanRecord]:
        """Records of every backward pass finished since the last call (with gradients=False: forward pass).

        Raises:
            NumericsError: a sample's gradients are all zero or not finite; its pass is dropped.
        """
        records, self._records = self._records, []
        while self._finished:
            record, skipped = to_record(self._finished.popleft(), gradients=self._gradients)
            self.skipped += skipped
            if record is not None:
                records.append(record)
        return records

    def _deliver(self) -> None:
        if self._sink is not None:
            for record in self.collect():
                self._sink(record)

    # Forward pass

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Hook before the model's forward."""
        if self._entered:
            if _inside_backward():
                return None  # checkpointing runs the whole model again; its modules know the pass
            self._entered = []  # a backward pass that failed
        self._deliver()
        self._running = None
        if self._gradients and not torch.is_grad_enabled():
            return None
        arguments = bind_arguments(model, args, kwargs)
        facts = read_call(arguments)
        self._step += 1
        names = self._names or [f"step {self._step}, sample {sample + 1}" for sample in range(facts.samples)]
        if len(names) != facts.samples:
            raise ConfigError(
                f"{len(names)} names for {facts.samples} samples", where="scanner.name_samples", do="name every sample"
            )
        self._running = ScanPass(facts, self._layout, names, self._source, self._per_token)
        self._names, self._source = None, ""
        return self._open_embeds(arguments) if self._gradients else None

    def _open_embeds(self, arguments: Mapping[str, Any]) -> tuple[Any, Any] | None:
        """With frozen weights nothing leads from the loss to the layers, unless the inputs ask for a gradient."""
        embeds = arguments.get("inputs_embeds")
        if not isinstance(embeds, Tensor) or embeds.requires_grad:
            return None
        return (), {**arguments, "inputs_embeds": embeds.detach().requires_grad_()}

    def _end(self, _model: nn.Module, _args: tuple[Any, ...], output: object) -> None:
        """Hook after the model's forward, also one that failed (output None)."""
        scan_pass, self._running = self._running, None
        if scan_pass is None or output is None:
            return
        if self._gradients:
            for tensor in _differentiable(output):
                tensor.register_hook(partial(self._enter, scan_pass))
        else:
            self._last_input = None
            self._finished.append(Measured(scan_pass, scan_pass.take()))

    def _current(self) -> ScanPass | None:
        """The pass a module runs for: forward, or again in a backward pass under checkpointing."""
        return self._running or (self._entered[-1] if self._entered else None)

    def _use(self, scan_pass: ScanPass, name: str) -> None:
        if scan_pass is not self._running:
            return
        if name in scan_pass.used:
            raise NumericsError(
                f"{name} ran twice in one forward pass; its weight's gradient is the sum of both",
                where="ParameterTensorScanner",
                do="leave it out: patterns=[...]",
            )
        scan_pass.used.add(name)

    def _on_linear(
        self, index: int, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor | None:
        scan_pass = self._current()
        if scan_pass is None:
            return None
        name = self.parameters[index].name.removesuffix(".weight")
        self._use(scan_pass, name)
        x: Tensor = args[0] if args else next(iter(kwargs.values()))
        if not self._gradients:
            measure.record_input(scan_pass, index, self._read(scan_pass, name, x.detach(), x.device))
            return None
        if not output.requires_grad:
            return None
        return watch(partial(self._receive_linear, scan_pass, index, name), output, x.detach())

    def _on_embedding(
        self, index: int, module: nn.Embedding, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor | None:
        scan_pass = self._current()
        if scan_pass is None:
            return None
        self._use(scan_pass, self.parameters[index].name.removesuffix(".weight"))
        scan_pass.ids_BT = args[0] if args else next(iter(kwargs.values()))
        if not self._gradients:
            measure.record_lookup(scan_pass, index, output.detach())
            return None
        if not torch.is_grad_enabled():
            return None
        if not output.requires_grad:
            output = output.detach().requires_grad_()
        return watch(partial(self._receive_embedding, scan_pass, index, module.padding_idx), output, output.detach())

    def _on_head(
        self, index: int, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor | None:
        scan_pass = self._current()
        if scan_pass is None or not self._gradients:
            return None
        name = self._head_name(index)
        self._use(scan_pass, name)
        if not output.requires_grad:
            return None
        x: Tensor = args[0] if args else next(iter(kwargs.values()))
        return watch(partial(self._receive_head, scan_pass, name), output, x.detach())

    # Backward pass

    def _enter(self, scan_pass: ScanPass, _grad: Tensor) -> None:
        """Hook on what the model returned: the backward pass reaches this pass."""
        if self._model is None or scan_pass in self._entered:
            return
        if not self._entered:
            torch.autograd.Variable._execution_engine.queue_callback(self._leave)
        self._entered.append(scan_pass)

    def _leave(self) -> None:
        """At the end of the whole backward pass."""
        self._finished.extend(Measured(scan_pass, scan_pass.take()) for scan_pass in self._entered)
        self._entered, self._last_input = [], None

    def _receive_linear(self, scan_pass: ScanPass, index: int, name: str, grad: Tensor, x: Tensor) -> None:
        if self._model is None:
            return
        inputs = self._read(scan_pass, name, x, grad.device)
        measure.record_input(scan_pass, index, inputs)
        measure.record_gradient(scan_pass, index, inputs, grad, self._product)

    def _receive_embedding(
        self, scan_pass: ScanPass, index: int, padding_idx: int | None, grad: Tensor, rows: Tensor
    ) -> None:
        if self._model is None:
            return
        measure.record_lookup(scan_pass, index, rows)
        # A loss fused with the output embedding goes past the module: half a gradient would be wrong.
        if self._targets[index].head is None or self._head_name(index) in scan_pass.used:
            measure.record_embedding(scan_pass, index, grad, padding_idx)

    def _receive_head(self, scan_pass: ScanPass, name: str, grad: Tensor, x: Tensor) -> None:
        if self._model is not None:
            measure.record_head(scan_pass, name, x, grad, self._product)

    def _head_name(self, index: int) -> str:
        return f"the output embedding tied to {self.parameters[index].name}"

    def _read(self, scan_pass: ScanPass, name: str, x: Tensor, device: torch.device) -> InputSquares:
        """The input's norms, those of the module before where it read the same (q, k and v; gate and up)."""
        if self._last_input is not None:
            last_pass, last = self._last_input
            if last_pass is scan_pass and last.is_of(x):
                return last
        inputs = measure.read_input(scan_pass, name, x, self.parameters[0].block_width, device)
        self._last_input = (scan_pass, inputs)
        return inputs


def _differentiable(output: object) -> list[Tensor]:
    """Tensors with a gradient in what a model returned."""
    if isinstance(output, Tensor):
        return [output] if output.requires_grad else []
    if isinstance(output, Mapping):
        return [tensor for value in output.values() for tensor in _differentiable(value)]
    if isinstance(output, (list, tuple)):
        return [tensor for value in output for tensor in _differentiable(value)]
    return []


def _inside_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
