"""Which forward pass a module runs for, and what its backward passes have finished."""

from collections import deque
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from models.backward import in_backward
from models.capture.parameters.scan_pass import ScanPass
from models.capture.parameters.transfer import Measured
from models.errors import NumericsError


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
