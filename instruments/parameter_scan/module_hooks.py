"""Forward hooks on the watched modules: what they read is measured as the gradient of what they give arrives."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from instruments.errors import NumericsError
from instruments.gradients import prefer_gram, watch, weight_squares
from instruments.parameter_scan.inputs import (
    InputSquares,
    embedding_columns,
    embedding_token_squares,
    head_part,
    split_samples,
    sum_blocks,
)
from instruments.parameter_scan.scan_pass import Measured, ScanPass
from instruments.parameter_scan.targets import Target
from instruments.precision.calls import in_backward


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

    def enter(self, name: str) -> ScanPass | None:
        """The pass a module runs for: forward, or again in a backward pass under checkpointing.

        Raises:
            NumericsError: it runs for the second time in one forward pass.
        """
        if self._running is None:
            return self._reached[-1] if self._reached else None
        if name in self._running.used:
            raise NumericsError(
                f"{name} ran twice in one forward pass; its weight's gradient is the sum of both",
                where="ParameterTensorScanner",
                do="leave it out: patterns=[...]",
            )
        self._running.used.add(name)
        return self._running

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
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, list | tuple) else ()
    return [tensor for value in values for tensor in _differentiable(value)]


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
        scan_pass = self.passes.enter(self._name(index))
        if scan_pass is None:
            return None
        x = _argument(args, kwargs).detach()
        if not self.gradients:
            self._record_input(scan_pass, index, x, x.device)
        if not self.gradients or not output.requires_grad:
            return None
        return self._watch(partial(self._record_linear, scan_pass, index), output, x)

    def _on_embedding(
        self, index: int, module: nn.Embedding, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor | None:
        scan_pass = self.passes.enter(self._name(index))
        if scan_pass is None:
            return None
        scan_pass.ids_BT = _argument(args, kwargs)
        if not self.gradients:
            self._record_lookup(scan_pass, index, output.detach())
        if not self.gradients or not torch.is_grad_enabled():
            return None
        if not output.requires_grad:
            output = output.detach().requires_grad_()
        receive = partial(self._record_embedding, scan_pass, index, module.padding_idx)
        return self._watch(receive, output, output.detach())

    def _on_head(
        self, index: int, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor | None:
        scan_pass = self.passes.enter(self._head_name(index)) if self.gradients else None
        if scan_pass is None or not output.requires_grad:
            return None
        return self._watch(partial(self._record_head, scan_pass, index), output, _argument(args, kwargs).detach())

    def _watch(self, receive: Callable[[Tensor, Tensor], None], output: Tensor, saved: Tensor) -> Tensor:
        """The output, whose gradient goes to `receive` with what was saved, while the scanner is there."""

        def unless_closed(grad: Tensor, saved: Tensor) -> None:
            if not self.passes.closed:
                receive(grad, saved)

        return watch(unless_closed, output, saved)

    def _name(self, index: int) -> str:
        return self.targets[index].parameter.name.removesuffix(".weight")

    def _head_name(self, index: int) -> str:
        return f"the output embedding tied to {self.targets[index].parameter.name}"

    def _record_input(self, scan_pass: ScanPass, index: int, x: Tensor, device: torch.device) -> InputSquares:
        """‖X‖² of a Linear; that of the module before where it read the same (q, k and v; gate and up)."""
        if scan_pass.last_input is None or not scan_pass.last_input.is_of(x):
            width = self.targets[index].parameter.block_width
            scan_pass.last_input = read_input(scan_pass, self._name(index), x, width, device)
        record_input(scan_pass, index, scan_pass.last_input)
        return scan_pass.last_input

    def _record_linear(self, scan_pass: ScanPass, index: int, grad: Tensor, x: Tensor) -> None:
        """‖X‖² and ‖∇W‖² of a Linear by block and by token."""
        inputs, width = self._record_input(scan_pass, index, x, grad.device), self.targets[index].parameter.block_width
        x_BTI = inputs.x_BTI
        grad_BTO = grad.reshape(*x_BTI.shape[:2], -1)
        gram = prefer_gram(self.product, x_BTI.shape[1], x_BTI.shape[2], grad_BTO.shape[2])
        columns_BI, rows_BO = weight_squares(x_BTI, grad_BTO, gram=gram, gram_BTT=inputs.gram() if gram else None)
        scan_pass.squares.in_gradient[index] = sum_blocks(columns_BI, width)
        scan_pass.squares.out_gradient[index] = sum_blocks(rows_BO, width)
        if scan_pass.per_token:
            norms_BT = torch.linalg.vector_norm(grad_BTO, dim=-1, dtype=torch.float32)
            scan_pass.squares.token_gradient[index] = inputs.token_squares_BT * norms_BT.square_()

    def _record_head(self, scan_pass: ScanPass, index: int, grad: Tensor, x: Tensor) -> None:
        """What a tied output embedding contributes to the embedding's gradient."""
        if scan_pass.ids_BT is None:
            return
        facts = scan_pass.facts
        x_BSD = split_samples(x, facts.samples, facts.length, self._head_name(index)).to(grad.device)
        grad_BSV = grad.reshape(*x_BSD.shape[:2], -1)
        gram = prefer_gram(self.product, x_BSD.shape[1], x_BSD.shape[2], grad_BSV.shape[2], rows=False)
        ids_BT = scan_pass.ids_BT.to(grad.device)
        scan_pass.head = head_part(x_BSD, grad_BSV, ids_BT, gram=gram, per_token=scan_pass.per_token)

    def _record_lookup(self, scan_pass: ScanPass, index: int, rows_BTD: Tensor) -> None:
        """‖rows looked up‖² of the embedding, not cut into blocks."""
        width = rows_BTD.shape[-1]
        record_input(scan_pass, index, read_input(scan_pass, self._name(index), rows_BTD, width, rows_BTD.device))

    def _record_embedding(
        self, scan_pass: ScanPass, index: int, padding_idx: int | None, delta_BTD: Tensor, rows_BTD: Tensor
    ) -> None:
        """‖rows looked up‖² and ‖∇W‖² of the embedding; complete, for the backward pass reaches the look-up last."""
        self._record_lookup(scan_pass, index, rows_BTD)
        # A loss fused with the output embedding goes past the module: half a gradient would be wrong.
        fused = self.targets[index].head is not None and self._head_name(index) not in scan_pass.used
        ids_BT, head = scan_pass.ids_BT, scan_pass.head
        if fused or ids_BT is None:
            return
        if padding_idx is not None:
            # nn.Embedding never trains this row, also for such tokens inside the text.
            delta_BTD = delta_BTD.masked_fill((ids_BT == padding_idx).unsqueeze(2), 0)
        if head is not None:
            head = head.to(delta_BTD.device)
        columns_BD = embedding_columns(ids_BT, delta_BTD, head)
        scan_pass.squares.out_gradient[index] = sum_blocks(columns_BD, self.targets[index].parameter.block_width)
        if scan_pass.per_token:
            scan_pass.squares.token_gradient[index] = embedding_token_squares(delta_BTD, head)
        scan_pass.head = None


def read_input(scan_pass: ScanPass, name: str, source: Tensor, width: int, device: torch.device) -> InputSquares:
    """Norms of a module's input. Raises ConfigError: its samples cannot be told apart."""
    facts = scan_pass.facts
    x_BTI = split_samples(source, facts.samples, facts.length, name).to(device)
    mask_BT = facts.mask_BT
    if mask_BT is not None:  # the output embedding may see the last positions only
        mask_BT = mask_BT[:, -x_BTI.shape[1] :].to(device, non_blocking=True)
    return InputSquares(source, x_BTI, mask_BT, width)


def record_input(scan_pass: ScanPass, index: int, inputs: InputSquares) -> None:
    """‖X‖² by block and by token."""
    scan_pass.squares.activation[index] = inputs.block_squares_Bi
    if scan_pass.per_token:
        scan_pass.squares.token_activation[index] = inputs.token_squares_BT


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The one tensor these modules take, by position or by name."""
    x: Tensor = args[0] if args else next(iter(kwargs.values()))
    return x
