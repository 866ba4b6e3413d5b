"""Forward hooks on the watched modules: norms are computed when the gradient of a module's output arrives."""

import logging
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from torch.utils.hooks import RemovableHandle

from instruments.errors import ConfigError, NumericsError, UserError
from instruments.gradients import prefer_gram, watch
from instruments.parameter_scan.block_squares import block_squares, sum_blocks
from instruments.parameter_scan.inputs import (
    InputNorms,
    InputSquares,
    Routes,
    embedding_columns,
    embedding_token_squares,
    expert_squares,
    head_part,
    inseparable,
    narrow,
    split_samples,
)
from instruments.parameter_scan.scan_pass import Measured, ScanPass
from instruments.parameter_scan.targets import Target, refusal, say_left_out
from instruments.parameter_scan.weight_uses import computes_linear, has_own_forward
from instruments.precision.calls import find_tensors, in_backward
from instruments.transformers_layers import ProductFinder, look_inside

logger = logging.getLogger(__name__)


class Passes:
    """The current forward pass, the passes reached by the current backward pass, and finished measurements."""

    def __init__(self) -> None:
        self.finished: deque[Measured] = deque()
        self.closed = False  # graphs may outlive the scanner
        self._running: ScanPass | None = None
        self._reached: list[ScanPass] = []
        self._warned = False

    def recomputed(self) -> bool:
        """Whether the forward pass that begins is recomputed by a backward pass (checkpointing of the whole model)."""
        if self._reached and not in_backward():
            self._reached = []  # left by a failed backward pass
        return bool(self._reached)

    def begin(self, scan_pass: ScanPass | None) -> None:
        """Begin a forward pass; None if it is not recorded."""
        self._running = scan_pass

    def enter(self, name: str) -> ScanPass | None:
        """The pass in which a module runs. Raises NumericsError: the module runs twice in one forward pass."""
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

    def drop(self, index: int) -> None:
        """Discard a parameter's norms in the current passes, including those still to be measured."""
        for scan_pass in filter(None, (self._running, *self._reached)):
            scan_pass.dropped.add(index)

    def end(self, output: object, *, gradients: bool) -> None:
        """End the forward pass (`output` None: it failed); with gradients, norms follow in the backward pass."""
        scan_pass, self._running = self._running, None
        if scan_pass is None or (output is None and sys.exc_info()[0] is not None):
            return
        if gradients:
            found = [tensor for tensor in find_tensors(output).values() if tensor.requires_grad]
            if not found and scan_pass.used and not self._warned and not isinstance(output, Tensor):
                self._warned = True
                logger.warning(
                    "parameter scan: no tensor with a gradient was found in the model's output (%s); layers that "
                    "reentrant checkpointing recomputes get no norms",
                    type(output).__name__,
                )
            for tensor in found:
                tensor.register_hook(partial(self.reach, scan_pass))
        else:
            self.finished.append(Measured(scan_pass, scan_pass.take()))

    def close(self) -> None:
        """Record nothing more; finished measurements stay."""
        self.closed, self._running, self._reached = True, None, []

    def reach(self, scan_pass: ScanPass, _grad: Tensor | None = None) -> None:
        """The backward pass has reached this pass: its outputs, or, if they were not found in it, a layer."""
        if self.closed or scan_pass in self._reached:
            return
        if not self._reached:
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        self._reached.append(scan_pass)

    def _finish(self) -> None:
        """Collect the measurements at the end of the whole backward pass."""
        self.finished.extend(Measured(scan_pass, scan_pass.take()) for scan_pass in self._reached)
        self._reached = []


def label_left_out(targets: Sequence[Target], index: int) -> str:
    """The name under which `left_out` lists a target; fused experts are listed together, under the first."""
    name = targets[index].parameter.name
    return f"{name} and the other experts" if targets[index].own else name


@dataclass(frozen=True)
class ModuleHooks:
    """Hooks by kind of module; they measure for the current pass of `passes`."""

    targets: Sequence[Target]
    passes: Passes
    gradients: bool
    product: str
    strict: bool  # modules that cannot be scanned are errors; otherwise they go to `left_out`
    left_out: dict[str, str]

    def install(self) -> list[RemovableHandle]:
        """Register the hooks on every target."""
        handles = []
        for index, target in enumerate(self.targets):
            module = target.module
            if target.own:
                if target.expert == 0:
                    handles += look_inside(module, partial(self._begin_experts, index))
            elif target.parameter.kind == "linear":
                handles.append(module.register_forward_hook(partial(self._on_linear, index), with_kwargs=True))
            elif type(module).forward is nn.Embedding.forward:
                handles.append(module.register_forward_hook(partial(self._on_embedding, index), with_kwargs=True))
            else:  # Gemma scales the rows, bitsandbytes' StableEmbedding normalises them
                handles += look_inside(module, lambda *_args, index=index, **_kwargs: partial(self._run_lookup, index))
            if target.head is not None:
                handles.append(target.head.register_forward_hook(partial(self._on_head, index), with_kwargs=True))
        return handles

    def _enter(self, index: int, name: str) -> ScanPass | None:
        """The pass in which a module runs. Raises NumericsError: `strict`, and the module runs for the second time."""
        try:
            return self.passes.enter(name)
        except NumericsError as error:
            self._leave_out(index, "it ran twice in one forward pass", error)
            return None

    def _leave_out(self, index: int, why: str, error: UserError | None = None) -> None:
        """Discard this parameter's norms in the current pass; warn once. Raises the error (ConfigError): `strict`."""
        if self.strict:
            raise error or refusal(f"{self.targets[index].parameter.name}: {why}", "leave it out: patterns=[...]")
        self.passes.drop(index)
        name = label_left_out(self.targets, index)
        if name not in self.left_out:
            self.left_out[name] = why
            logger.warning("parameter scan: %s", say_left_out({name: why}))

    def leave_out_used_elsewhere(self, functions: Mapping[int, str]) -> None:
        """At the end of a forward pass: discard the norms of weights that functions have used outside their module."""
        for index, name in functions.items():
            self._leave_out(index, f"{name} uses it outside its module")

    def _fits(self, scan_pass: ScanPass, index: int, tensor: Tensor, name: str) -> bool:
        """Whether the tensor's samples can be separated. Raises ConfigError: `strict`, and they cannot."""
        facts = scan_pass.facts.side(tensor, name)
        if facts is None:
            self._leave_out(index, "it may belong to the encoder or the decoder: pad them to different lengths")
            return False
        try:
            scan_pass.require_samples_first(tensor, name)
            split_samples(tensor, facts.samples, facts.length, name)
        except ConfigError as error:
            self._leave_out(index, "its samples cannot be separated", error)
            return False
        return True

    def _on_linear(
        self, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor | None:
        scan_pass = self._enter(index, self._name(index))
        if scan_pass is None:
            return None
        x = _argument(args, kwargs).detach()
        if not self._fits(scan_pass, index, x, self._name(index)):
            return None
        if not self.gradients:
            self._record_input(scan_pass, index, x, x.device)
        if not self.gradients:
            return None
        if has_own_forward(module) and not (isinstance(output, Tensor) and computes_linear(module, x, output)):
            self._leave_out(index, f"{type(module).__name__} computes more than a Linear layer")
            return None
        if not output.requires_grad:
            return None
        return self._watch(scan_pass, index, partial(self._record_linear, scan_pass, index), output, x)

    def _on_embedding(
        self, index: int, _module: nn.Embedding, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor | None:
        return self._on_lookup(index, _argument(args, kwargs), output)

    def _run_lookup(self, index: int, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401 - the function's result
        output = func(*args, **kwargs)
        if func is not embedding or args[1] is not self.targets[index].module.weight:
            return output
        watched = self._on_lookup(index, args[0], output)
        return output if watched is None else watched

    def _on_lookup(self, index: int, ids_BT: Tensor, output: Tensor) -> Tensor | None:
        """An embedding looks rows up."""
        scan_pass = self._enter(index, self._name(index))
        rows = ids_BT.unsqueeze(-1) if ids_BT.ndim == 2 else ids_BT[None, None, ..., None]  # a shape that never fits
        if scan_pass is None:
            return None
        scan_pass.note_order(ids_BT)
        if not self._fits(scan_pass, index, rows, self._name(index)):
            return None
        scan_pass.ids[index] = ids_BT
        rows_BTD = output.detach()
        # Measured now: the model may scale the rows in place.
        norms = read_input(scan_pass, self._name(index), rows_BTD, rows_BTD.shape[-1], rows_BTD.device).norms()
        if not self.gradients:
            record_input(scan_pass, index, norms)
        if not self.gradients or not torch.is_grad_enabled():
            return None
        if not output.requires_grad:
            output = rows_BTD.requires_grad_()
        return self._watch(scan_pass, index, partial(self._record_embedding, scan_pass, index, norms), output)

    def _on_head(
        self, index: int, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor | None:
        name = self._head_name(index)
        scan_pass = self._enter(index, name) if self.gradients else None
        if scan_pass is None or not output.requires_grad:
            return None
        x = _argument(args, kwargs).detach()
        if not self._fits(scan_pass, index, x, name):
            return None
        return self._watch(scan_pass, index, partial(self._record_head, scan_pass, index), output, x)

    def _begin_experts(
        self, index: int, _hidden_states: Tensor, top_k_index: Tensor, *_args: object, **_kwargs: object
    ) -> Callable[..., Any] | None:
        """Fused experts are called; `index` is that of the first expert.

        Raises ConfigError: `strict`, and not all tokens are passed.
        """
        scan_pass = self._enter(index, self._name(index))
        if scan_pass is None:
            return None
        facts = scan_pass.facts
        if facts.decoder is not None or len(top_k_index) != facts.samples * facts.length:
            error = inseparable(self._name(index), f"{len(top_k_index)} tokens", facts.samples, facts.length)
            self._leave_out(index, "its samples cannot be separated", error)
            return None
        target = self.targets[index]
        return partial(self._run_product, scan_pass, index, ProductFinder(target.module, target.own, top_k_index))

    def _run_product(
        self,
        scan_pass: ScanPass,
        index: int,
        finder: ProductFinder,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:  # noqa: ANN401 - the function's result
        output, found = func(*args, **kwargs), finder.find(func, args, kwargs)
        if not found:
            return output
        token_R, x_RI = finder.tokens(func, found["expert"]), found["input"].detach()
        routes = Routes(token_R, found["expert"], scan_pass.facts.samples, scan_pass.facts.length)
        if not self.gradients:
            self._record_experts(scan_pass, index, routes, None, x_RI)
        if not self.gradients or not output.requires_grad:
            return output
        return self._watch(scan_pass, index, partial(self._record_experts, scan_pass, index, routes), output, x_RI)

    def _record_experts(
        self, scan_pass: ScanPass, index: int, routes: Routes, grad: Tensor | None, x_RI: Tensor
    ) -> None:
        """‖X‖² and ‖∇W‖² of every expert over its rows; zero for experts that were not chosen."""
        target, mask_BT = self.targets[index], scan_pass.facts.mask_BT
        mask_R = None if mask_BT is None else mask_BT.to(x_RI.device).flatten()[routes.token_R]
        found = expert_squares(
            routes, x_RI, None if grad is None else grad.flatten(1), mask_R, target, self.product, scan_pass.per_token
        )
        for name, squares_BEn in found.items():
            pieces: dict[int, Tensor] = getattr(scan_pass.squares, name)
            for expert, squares_Bn in enumerate(squares_BEn.unbind(1)):  # eager kernels run one expert per call
                pieces[index + expert] = pieces.get(index + expert, 0) + squares_Bn

    def _watch(
        self, scan_pass: ScanPass, index: int, receive: Callable[..., None], output: Tensor, *saved: Tensor
    ) -> Tensor:
        """The output; its gradient and `saved`, the input, are passed to `receive` while the scanner is open."""
        versions = [tensor._version for tensor in saved]

        def on_changed() -> None:
            if not self.passes.closed:
                self._leave_out(index, "the model changes its input in place")

        def unless_closed(grad: Tensor, *saved: Tensor) -> None:
            # A checkpoint recomputes the saved tensors, and autograd does not compare their versions.
            if any(tensor._version > version for tensor, version in zip(saved, versions, strict=True)):
                on_changed()
            elif not self.passes.closed:
                self.passes.reach(scan_pass)
                receive(narrow(grad), *map(narrow, saved))

        return watch(unless_closed, output, *saved, on_changed=on_changed)

    def _name(self, index: int) -> str:
        return self.targets[index].parameter.name.removesuffix(".weight")

    def _head_name(self, index: int) -> str:
        return f"the output embedding tied to {self.targets[index].parameter.name}"

    def _record_input(self, scan_pass: ScanPass, index: int, x: Tensor, device: torch.device) -> InputSquares:
        """‖X‖² of a Linear; reused for modules with the same input (q, k and v; gate and up)."""
        if scan_pass.last_input is None or not scan_pass.last_input.is_of(x, self.targets[index].parameter.in_width):
            width = self.targets[index].parameter.in_width
            scan_pass.last_input = read_input(scan_pass, self._name(index), x, width, device)
        record_input(scan_pass, index, scan_pass.last_input.norms())
        return scan_pass.last_input

    def _record_linear(self, scan_pass: ScanPass, index: int, grad: Tensor, x: Tensor) -> None:
        """‖X‖² and ‖∇W‖² of a Linear, per block and token."""
        inputs, parameter = self._record_input(scan_pass, index, x, grad.device), self.targets[index].parameter
        x_BTI = inputs.x_BTI
        grad_BTO = grad.reshape(*x_BTI.shape[:2], -1)
        widths = parameter.in_width, parameter.out_width
        columns_Bi, rows_Bo = block_squares(x_BTI, grad_BTO, widths, product=self.product, gram=inputs.gram)
        scan_pass.squares.in_gradient[index], scan_pass.squares.out_gradient[index] = columns_Bi, rows_Bo
        if scan_pass.per_token and inputs.of_tokens:
            norms_BT = torch.linalg.vector_norm(grad_BTO, dim=-1, dtype=torch.float32)
            scan_pass.squares.token_gradient[index] = inputs.token_squares_BT * norms_BT.square_()

    def _record_head(self, scan_pass: ScanPass, index: int, grad: Tensor, x: Tensor) -> None:
        """Reduce the tied output embedding's part of the embedding's gradient."""
        if index not in scan_pass.ids:
            return
        facts = scan_pass.facts.side(x, self._head_name(index)) or scan_pass.facts
        x_BSD = split_samples(x, facts.samples, facts.length, self._head_name(index)).to(grad.device)
        grad_BSV = grad.reshape(*x_BSD.shape[:2], -1)
        gram = prefer_gram(self.product, x_BSD.shape[1], x_BSD.shape[2], grad_BSV.shape[2], rows=False)
        ids_BT = scan_pass.ids[index].to(grad.device)
        scan_pass.heads[index] = head_part(x_BSD, grad_BSV, ids_BT, gram=gram, per_token=scan_pass.per_token)

    def _record_embedding(self, scan_pass: ScanPass, index: int, norms: InputNorms, delta_BTD: Tensor) -> None:
        """‖rows looked up‖² and ‖∇W‖² of an embedding; the backward pass reaches the look-up after the head."""
        record_input(scan_pass, index, norms)
        # A loss fused with the output embedding bypasses the module; without its part the gradient would be wrong.
        fused = self.targets[index].head is not None and self._head_name(index) not in scan_pass.used
        if fused:
            return
        ids_BT, head = scan_pass.ids[index], scan_pass.heads.pop(index, None)
        padding_idx: Any = self.targets[index].module.padding_idx
        if padding_idx is not None:
            # nn.Embedding never trains this row, also where the token occurs inside the text.
            delta_BTD = delta_BTD.masked_fill((ids_BT == padding_idx).unsqueeze(2), 0)
        if head is not None:
            head = head.to(delta_BTD.device)
        columns_BD = embedding_columns(ids_BT, delta_BTD, head)
        scan_pass.squares.out_gradient[index] = sum_blocks(columns_BD, self.targets[index].parameter.out_width)
        if scan_pass.per_token and norms.token_squares_BT is not None:
            scan_pass.squares.token_gradient[index] = embedding_token_squares(delta_BTD, head)


def read_input(scan_pass: ScanPass, name: str, source: Tensor, width: int, device: torch.device) -> InputSquares:
    """Norms of a module's input. Raises ConfigError: its samples cannot be separated."""
    facts = scan_pass.facts.side(source, name) or scan_pass.facts
    x_BTI = narrow(split_samples(source, facts.samples, facts.length, name)).to(device)
    mask_BT = facts.mask_BT
    if source.ndim == 2 and x_BTI.shape[1] == 1:
        mask_BT = None  # pooled: one row per sample
    if mask_BT is not None:  # the output embedding may get only the last positions
        mask_BT = mask_BT[:, -x_BTI.shape[1] :].to(device, non_blocking=True)
    return InputSquares(source, x_BTI, mask_BT, width, of_tokens=scan_pass.facts.has_tokens(facts))


def record_input(scan_pass: ScanPass, index: int, norms: InputNorms) -> None:
    """Store ‖X‖² per block and token."""
    scan_pass.squares.activation[index] = norms.block_squares_Bi
    if scan_pass.per_token and norms.token_squares_BT is not None:
        scan_pass.squares.token_activation[index] = norms.token_squares_BT


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The single tensor argument of these modules, positional or by name."""
    x: Tensor = args[0] if args else next(iter(kwargs.values()))
    return x
