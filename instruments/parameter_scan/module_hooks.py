"""Hooks on watched modules, which compute norms once an output's gradient arrives, and on other uses of a weight."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from torch.utils.hooks import RemovableHandle

from instruments.gradients import prefer_gram, sum_blocks, watch, weight_squares
from instruments.hooks import EagerHook, look_inside
from instruments.parameter_scan import inputs
from instruments.parameter_scan.passes import Passes, ScanPass
from instruments.parameter_scan.targets import Target
from instruments.transformers_layers import ProductFinder


@dataclass(frozen=True)
class TargetHooks:
    """Hooks on the modules of one target; they measure for the current pass of `passes`."""

    target: Target
    passes: Passes

    def install(self) -> Iterator[AbstractContextManager[object]]:
        """Contexts that register the hooks, by kind of module."""
        module, head = self.target.module, self.target.head
        if self.target.fused:
            yield look_inside(module, self._begin_experts)
        elif self.target.parameter.kind == "linear":
            yield _listen(module, self._on_linear)
        elif type(module).forward is nn.Embedding.forward:
            yield _listen(module, self._on_lookup)
        else:  # Gemma scales the rows, bitsandbytes' StableEmbedding normalises them
            yield look_inside(module, lambda *_args, **_kwargs: self._run_lookup)
        if head is not None:
            yield _listen(head, self._on_head)

    @property
    def _name(self) -> str:
        return self.target.parameter.name.removesuffix(".weight")

    @property
    def _head_name(self) -> str:
        return f"the output embedding tied to {self.target.parameter.name}"

    def _leave_out(self, why: str) -> None:
        self.passes.leave_out(self.target, why)

    def _enter(self, x: Tensor, name: str, ids_BT: Tensor | None = None) -> ScanPass | None:
        """The pass in which the module `name` gets the input `x`; None if nothing is to be watched."""

        def misfit(scan_pass: ScanPass) -> str:
            if ids_BT is not None:
                scan_pass.note_order(ids_BT)
            return scan_pass.misfit(x, is_output=self.target.is_output or name == self._head_name)

        return self.passes.enter(self.target, name, x, misfit)

    def _watch(self, scan_pass: ScanPass, receive: Callable[..., None], output: Tensor, *saved: Tensor) -> Tensor:
        """The output; while the scanner is open, `receive` gets the pass, the output's gradient and the saved input."""
        versions = [tensor._version for tensor in saved]

        def on_changed() -> None:
            if not self.passes.closed:
                self._leave_out("the model changes its input in place")

        def unless_closed(grad: Tensor, *saved: Tensor) -> None:
            # A checkpoint recomputes the saved tensors, and autograd does not compare their versions.
            if any(tensor._version > version for tensor, version in zip(saved, versions, strict=True)):
                on_changed()
            elif self.passes.is_reached(scan_pass) and self.target.column not in scan_pass.dropped:
                receive(scan_pass, inputs.narrow(grad), *map(inputs.narrow, saved))

        return watch(unless_closed, output, *saved, on_changed=on_changed)

    def _on_linear(self, x: Tensor, output: Tensor) -> Tensor | None:
        x = x.detach()
        scan_pass = self._enter(x, self._name)
        if scan_pass is None:
            return None
        if not self.passes.gradients:
            squares_Bi = self._see_input(scan_pass, x, x.device).block_squares_Bi
            scan_pass.squares.activation[self.target.column] = squares_Bi
            return None
        return self._watch(scan_pass, self._record_linear, output, x) if output.requires_grad else None

    def _see_input(self, scan_pass: ScanPass, x: Tensor, device: torch.device) -> inputs.InputSquares:
        """The input of a Linear; the same for modules with the same input (q, k and v; gate and up)."""
        width = self.target.parameter.in_width
        if scan_pass.last_input is None or not scan_pass.last_input.is_of(x, width):
            scan_pass.last_input = scan_pass.read_input(x, width, device)
        return scan_pass.last_input

    def _record_linear(self, scan_pass: ScanPass, grad: Tensor, x: Tensor) -> None:
        """‖X‖² and ‖∇W‖² of a Linear, per block."""
        seen = self._see_input(scan_pass, x, grad.device)
        if scan_pass.linears.add(self.target, seen, grad.reshape(*seen.x_BTI.shape[:2], -1)):
            self.passes.measure_linears(scan_pass)

    def _run_lookup(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401 - the function's result
        output = func(*args, **kwargs)
        if func is not embedding or args[1] is not self.target.module.weight:
            return output
        watched = self._on_lookup(args[0], output)
        return output if watched is None else watched

    def _on_lookup(self, ids_BT: Tensor, output: Tensor) -> Tensor | None:
        """An embedding looks rows up."""
        ids_BT1 = ids_BT.unsqueeze(-1) if ids_BT.ndim == 2 else ids_BT[None, None, ..., None]  # a shape that never fits
        scan_pass = self._enter(ids_BT1, self._name, ids_BT)
        if scan_pass is None:
            return None
        scan_pass.ids[self.target.column] = ids_BT
        rows_BTD = output.detach()
        squares_B1 = rows_BTD.new_empty(0)
        if self.target.column not in scan_pass.dropped:  # measured now: the model may scale the rows in place
            squares_B1 = scan_pass.read_input(rows_BTD, rows_BTD.shape[-1], rows_BTD.device).block_squares_Bi
        if not self.passes.gradients:
            scan_pass.squares.activation[self.target.column] = squares_B1
            return None
        if not torch.is_grad_enabled():
            return None
        if not output.requires_grad:
            output = rows_BTD.requires_grad_()
        return self._watch(scan_pass, partial(self._record_embedding, squares_B1), output)

    def _record_embedding(self, squares_B1: Tensor, scan_pass: ScanPass, delta_BTD: Tensor) -> None:
        """‖rows looked up‖² and ‖∇W‖² of an embedding; the backward pass reaches the look-up after the head."""
        target, column = self.target, self.target.column
        scan_pass.squares.activation[column] = squares_B1
        # A loss fused with the output embedding bypasses the module; without its part the gradient would be wrong.
        if target.head is not None and self._head_name not in scan_pass.used:
            return
        ids_BT, head = scan_pass.ids[column], scan_pass.heads.pop(column, None)
        padding_idx: Any = target.module.padding_idx
        if padding_idx is not None:
            # nn.Embedding never trains this row, also where the token occurs inside the text.
            delta_BTD = delta_BTD.masked_fill((ids_BT == padding_idx).unsqueeze(2), 0)
        if head is not None:
            head = head.to(delta_BTD.device)
        columns_BD = inputs.embedding_columns(ids_BT, delta_BTD, head)
        scan_pass.squares.out_gradient[column] = sum_blocks(columns_BD, target.parameter.out_width)

    def _on_head(self, x: Tensor, output: Tensor) -> Tensor | None:
        """The output embedding tied to this embedding runs."""
        scan_pass = self._enter(x, self._head_name) if self.passes.gradients else None
        if scan_pass is None or not output.requires_grad:
            return None
        return self._watch(scan_pass, self._record_head, output, x.detach())

    def _record_head(self, scan_pass: ScanPass, grad: Tensor, x: Tensor) -> None:
        """Reduce the tied output embedding's part of the embedding's gradient."""
        if self.target.column not in scan_pass.ids:
            return
        x_BSD = scan_pass.facts.split(x)
        assert x_BSD is not None
        x_BSD = x_BSD.to(grad.device)
        grad_BSV = grad.reshape(*x_BSD.shape[:2], -1)
        gram = prefer_gram(self.passes.product, x_BSD.shape[1], x_BSD.shape[2], grad_BSV.shape[2], rows=False)
        ids_BT = scan_pass.ids[self.target.column].to(grad.device)
        scan_pass.heads[self.target.column] = inputs.head_part(x_BSD, grad_BSV, ids_BT, gram=gram)

    def _begin_experts(
        self, hidden_states: Tensor, top_k_index: Tensor, *_args: object, **_kwargs: object
    ) -> Callable[..., Any] | None:
        """Fused experts are called; they are left out if not all tokens are passed."""

        def misfit(scan_pass: ScanPass) -> str:
            whole = len(top_k_index) == scan_pass.facts.samples * scan_pass.facts.length
            return "" if whole else "its samples cannot be separated"

        scan_pass = self.passes.enter(self.target, self._name, hidden_states, misfit)
        if scan_pass is None:
            return None
        return partial(self._run_product, scan_pass, ProductFinder(self.target.module, self.target.fused, top_k_index))

    def _run_product(
        self,
        scan_pass: ScanPass,
        finder: ProductFinder,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:  # noqa: ANN401 - the function's result
        output, found = func(*args, **kwargs), finder.find(func, args, kwargs)
        if not found:
            return output
        token_R, x_RI = finder.tokens(func, found["expert"]), found["input"].detach()
        record = partial(self._record_experts, token_R, found["expert"])
        if not self.passes.gradients:
            record(scan_pass, None, x_RI)
            return output
        return self._watch(scan_pass, record, output, x_RI) if output.requires_grad else output

    def _record_experts(
        self, token_R: Tensor, expert_R: Tensor, scan_pass: ScanPass, grad_RO: Tensor | None, x_RI: Tensor
    ) -> None:
        """‖X‖² and ‖∇W‖² of every expert over its rows; zero for experts that were not chosen.

        `token_R` counts over all samples; a token has at most one row per expert.
        """
        facts, parameter, experts = scan_pass.facts, self.target.parameter, len(self.target.parameters)
        group_R = (token_R // facts.length * experts + expert_R).to(x_RI.device)
        squares_Ri = inputs.token_block_squares(x_RI.unsqueeze(0), parameter.in_width).squeeze(0)
        zeros_Gi = squares_Ri.new_zeros(facts.samples * experts, parameter.in_blocks)
        if facts.mask_BT is not None:
            squares_Ri *= facts.mask_BT.to(x_RI.device).flatten()[token_R].unsqueeze(1)
        found = {"activation": zeros_Gi.index_add(0, group_R, squares_Ri)}
        if grad_RO is not None:
            grad_RO = grad_RO.flatten(1)
            found |= {"in_gradient": zeros_Gi, "out_gradient": zeros_Gi.new_zeros(len(zeros_Gi), parameter.out_blocks)}
            groups, counts = group_R.unique(return_counts=True)
            places = group_R.argsort(stable=True).split(counts.tolist())  # masks would make a GPU's host wait for each
            for group, rows in zip(groups.tolist(), places, strict=True):
                x, grad = x_RI[rows].unsqueeze(0), grad_RO[rows].unsqueeze(0)
                gram = prefer_gram(self.passes.product, x.shape[1], x.shape[2], grad.shape[2])
                columns_1I, rows_1O = weight_squares(x, grad, gram=gram)
                found["in_gradient"][group] = sum_blocks(columns_1I, parameter.in_width)[0]
                found["out_gradient"][group] = sum_blocks(rows_1O, parameter.out_width)[0]
        for name, squares_Gn in found.items():
            pieces: dict[int, Tensor] = getattr(scan_pass.squares, name)
            squares_BEn = squares_Gn.unflatten(0, (facts.samples, experts))
            # Eager kernels run one expert per call.
            for column, squares_Bn in zip(self.target.columns, squares_BEn.unbind(1), strict=True):
                pieces[column] = pieces.get(column, 0) + squares_Bn


def _listen(module: nn.Module, receive: Callable[[Tensor, Tensor], Tensor | None]) -> RemovableHandle:
    """Pass the module's single argument and its output to `receive`; a returned tensor replaces the output."""

    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
        return receive(args[0] if args else next(iter(kwargs.values())), output)

    return module.register_forward_hook(EagerHook(hook), with_kwargs=True)


# Results that carry no gradient to the weight.
_WITHOUT_GRADIENT = {Tensor.detach, Tensor.data.__get__, Tensor.grad.__get__}  # type: ignore[attr-defined, union-attr]


class WeightUses:
    """Notes every function that uses a watched weight outside its module, such as a tie by F.linear.

    During a pass each weight is of a subclass of its class, except while its own module runs. So torch calls Python for
    these functions alone, not for all of the model.
    """

    def __init__(self, targets: Sequence[Target]) -> None:
        """Watch the weights of Linear layers, Conv1D and embeddings."""
        self.found: dict[Target, str] = {}  # target → function
        self._targets = [target for target in targets if not target.fused]
        self._weights: dict[int, tuple[Tensor, Target]] = {}  # by id: the weight, kept alive, and its target
        self._kinds: dict[type, type] = {}  # class of a weight → its subclass

    def install(self) -> Iterator[RemovableHandle]:
        """Hooks on the modules, whose own use of the weight is not noted."""
        for target in self._targets:
            for module in filter(None, (target.module, target.head)):
                begin = EagerHook(lambda own, *_: self._release(own._parameters.get("weight")))
                end = EagerHook(lambda own, *_: self._mark(own._parameters.get("weight")))
                yield module.register_forward_pre_hook(begin)
                yield module.register_forward_hook(end, always_call=True)

    def begin(self) -> None:
        """A forward pass begins."""
        self.end()  # a pass may have been interrupted
        self.found = {}
        weights = ((target.module._parameters.get("weight"), target) for target in self._targets)
        self._weights = {id(weight): (weight, target) for weight, target in weights if weight is not None}
        for weight, _ in self._weights.values():
            self._mark(weight)

    def end(self) -> Mapping[Target, str]:
        """The pass ends: the functions that used each target's weight outside its module."""
        for weight, _ in self._weights.values():
            self._release(weight)
        self._weights = {}
        return self.found

    def _mark(self, weight: Tensor | None) -> None:
        """Let `_note` get the functions that use the weight."""
        if id(weight) in self._weights and not isinstance(weight, _Marked):
            kind = type(weight)
            if kind not in self._kinds:
                self._kinds[kind] = type(kind.__name__, (_Marked, kind), {"note": staticmethod(self._note)})
            weight.__class__ = self._kinds[kind]

    def _release(self, weight: Tensor | None) -> None:
        if isinstance(weight, _Marked):
            weight.__class__ = type(weight).__bases__[1]

    def _note(self, func: Callable[..., Any], values: Sequence[Any], result: object) -> None:
        """A function has used a marked weight."""
        for value in _flat(values):
            weight, target = self._weights.get(id(value), (None, None))
            if target is None or value is not weight or func in _WITHOUT_GRADIENT:
                continue
            tensors = (one for one in _flat([result]) if isinstance(one, Tensor))
            if any(one is not weight and one.is_floating_point() for one in tensors):
                self.found[target] = getattr(func, "__name__", str(func))


class _Marked(Tensor):
    """First base class of a marked weight; the second is the weight's own."""

    note: Callable[..., None]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - any result of the function
        # Of the class that follows in order: the weight's own.
        result = super().__torch_function__(func, types, args, kwargs or {})
        if not torch.compiler.is_compiling():
            cls.note(func, (*args, *(kwargs or {}).values()), result)
        return result


def _flat(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value
