"""Forward hooks on the watched modules: what they read is measured as the gradient of what they give arrives."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from instruments.autograd import in_backward, watch
from instruments.errors import NumericsError
from instruments.parameter_scan.measure import read_input, record_embedding, record_gradient, record_head, record_input, record_lookup
from instruments.parameter_scan.inputs import InputSquares
from instruments.parameter_scan.scan_pass import ScanPass
from instruments.parameter_scan.targets import Target
from instruments.parameter_scan.transfer import Measured


class Passes:
    """The forward pass under way, those the backward pass under way has reached, and what they measured."""

    def __init__(self) -> None:
        """Nothing runs."""
        self.finished: deque[Measured] = deque()
        self.closed = False  # graphs may outlive the scanner
        self._running: ScanPass | None = None
        self._reached: list[ScanPass] = []

    def recomputed(self) -> bool:
        """Whether a forward pass that begins now is a backward pass's own: checkpointing of the whole model."""
        if self._reached and not in_backward():
            self._reached = []  # of a backward pass that failed
        return bool(self._reached)

    def begin(self, scan_pass: ScanPass | None) -> None:
        """A forward pass begins; None for one that is not recorded."""
        self._running = scan_pass

    def current(self) -> ScanPass | None:
        """The pass a module runs for: forward, or again in a backward pass under checkpointing."""
        return self._running or (self._reached[-1] if self._reached else None)

    def use(self, scan_pass: ScanPass, name: str) -> None:
        """A module runs. Raises NumericsError: for the second time in one forward pass."""
        if scan_pass is not self._running:
            return
        if name in scan_pass.used:
            raise NumericsError(
                f"{name} ran twice in one forward pass; its weight's gradient is the sum of both",
                where="ParameterTensorScanner",
                do="leave it out: patterns=[...]",
            )
        scan_pass.used.add(name)

    def end(self, output: object, *, gradients: bool) -> None:
        """The forward pass ends, with None where it failed; with gradients its figures come with the backward pass."""
        scan_pass, self._running = self._running, None
        if scan_pass is None or output is None:
            return
        if gradients:
            for tensor in _differentiable(output):
                tensor.register_hook(partial(self._reach, scan_pass))
        else:
            self.finished.append(Measured(scan_pass, scan_pass.take()))

    def close(self) -> None:
        """Nothing more is recorded; what is finished stays."""
        self.closed, self._running, self._reached = True, None, []

    def _reach(self, scan_pass: ScanPass, _grad: Tensor) -> None:
        """Hook on what the model returned: the backward pass reaches this pass."""
        if self.closed or scan_pass in self._reached:
            return
        if not self._reached:
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        self._reached.append(scan_pass)

    def _finish(self) -> None:
        """At the end of the whole backward pass."""
        self.finished.extend(Measured(scan_pass, scan_pass.take()) for scan_pass in self._reached)
        self._reached = []


def _differentiable(output: object) -> list[Tensor]:
    """Tensors with a gradient in what a model returned."""
    if isinstance(output, Tensor):
        return [output] if output.requires_grad else []
    if isinstance(output, Mapping):
        return [tensor for value in output.values() for tensor in _differentiable(value)]
    if isinstance(output, (list, tuple)):
        return [tensor for value in output for tensor in _differentiable(value)]
    return []


@dataclass(frozen=True)
class ModuleHooks:
    """Hooks by kind of module, for the pass that `passes` names."""

    targets: Sequence[Target]
    passes: Passes
    gradients: bool
    product: str

    def install(self) -> list[RemovableHandle]:
        """Put them on every target."""
        handles = []
        for index, target in enumerate(self.targets):
            hook = self._on_linear if target.parameter.kind == "linear" else self._on_embedding
            handles.append(target.module.register_forward_hook(partial(hook, index), with_kwargs=True))
            if target.head is not None:
                handles.append(target.head.register_forward_hook(partial(self._on_head, index), with_kwargs=True))
        return handles

    def _on_linear(
        self, index: int, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor | None:
        scan_pass = self.passes.current()
        if scan_pass is None:
            return None
        name = self.targets[index].parameter.name.removesuffix(".weight")
        self.passes.use(scan_pass, name)
        x = _argument(args, kwargs)
        if not self.gradients:
            record_input(scan_pass, index, self._read(scan_pass, name, x.detach(), x.device))
            return None
        if not output.requires_grad:
            return None
        return watch(partial(self._receive_linear, scan_pass, index, name), output, x.detach())

    def _on_embedding(
        self, index: int, module: nn.Embedding, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor | None:
        scan_pass = self.passes.current()
        if scan_pass is None:
            return None
        self.passes.use(scan_pass, self.targets[index].parameter.name.removesuffix(".weight"))
        scan_pass.ids_BT = _argument(args, kwargs)
        if not self.gradients:
            record_lookup(scan_pass, index, output.detach())
            return None
        if not torch.is_grad_enabled():
            return None
        if not output.requires_grad:
            output = output.detach().requires_grad_()
        return watch(partial(self._receive_embedding, scan_pass, index, module.padding_idx), output, output.detach())

    def _on_head(
        self, index: int, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor | None:
        scan_pass = self.passes.current()
        if scan_pass is None or not self.gradients:
            return None
        name = self._head_name(index)
        self.passes.use(scan_pass, name)
        if not output.requires_grad:
            return None
        return watch(partial(self._receive_head, scan_pass, name), output, _argument(args, kwargs).detach())

    def _receive_linear(self, scan_pass: ScanPass, index: int, name: str, grad: Tensor, x: Tensor) -> None:
        if self.passes.closed:
            return
        inputs = self._read(scan_pass, name, x, grad.device)
        record_input(scan_pass, index, inputs)
        record_gradient(scan_pass, index, inputs, grad, self.product)

    def _receive_embedding(
        self, scan_pass: ScanPass, index: int, padding_idx: int | None, grad: Tensor, rows: Tensor
    ) -> None:
        if self.passes.closed:
            return
        record_lookup(scan_pass, index, rows)
        # A loss fused with the output embedding goes past the module: half a gradient would be wrong.
        if self.targets[index].head is None or self._head_name(index) in scan_pass.used:
            record_embedding(scan_pass, index, grad, padding_idx)

    def _receive_head(self, scan_pass: ScanPass, name: str, grad: Tensor, x: Tensor) -> None:
        if not self.passes.closed:
            record_head(scan_pass, name, x, grad, self.product)

    def _head_name(self, index: int) -> str:
        return f"the output embedding tied to {self.targets[index].parameter.name}"

    def _read(self, scan_pass: ScanPass, name: str, x: Tensor, device: torch.device) -> InputSquares:
        """The input's norms, those of the module before where it read the same (q, k and v; gate and up)."""
        if scan_pass.last_input is None or not scan_pass.last_input.is_of(x):
            width = self.targets[0].parameter.block_width
            scan_pass.last_input = read_input(scan_pass, name, x, width, device)
        return scan_pass.last_input


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The one tensor these modules take, by position or by name."""
    x: Tensor = args[0] if args else next(iter(kwargs.values()))
    return x
