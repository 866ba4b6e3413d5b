"""Trace the module calls of a running model; find the tensors in arguments and outputs; hooks that are not copied."""

import copy
import sys
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from torch.distributed.tensor import DTensor


def in_backward() -> bool:
    """Whether this thread runs a backward pass, including the recomputed forward pass of a checkpoint."""
    return torch._C._current_graph_task_id() != -1


def in_training_pass() -> bool:
    """Whether a forward pass with gradients runs: neither compiled, nor recomputed, nor transformed by torch.func."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or in_backward():
        return False
    return not in_transform()


def in_transform() -> bool:
    """Whether a transform of torch.func (vmap, grad) runs, whose tensors must not outlive it."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Whether it is a DTensor; avoids importing its module, which takes half a second."""
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def as_real(tensor: Tensor) -> Tensor:
    """A complex tensor as pairs along one more axis; others as they are."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def plain_name(name: str) -> str:
    """Remove the parts that FSDP, checkpointing and torch.compile insert into module names."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS[1:])


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Call(NamedTuple):
    """The n-th call of a module in one pass; `module` is its name, empty for the whole model."""

    module: str
    number: int

    def __str__(self) -> str:
        """The name, with a number from the second call on."""
        name = self.module or "(model)"
        return f"{name} (call {self.number + 1})" if self.number else name


class ModuleEvents:
    """Receives module events; children finish before their parents. The base class ignores them."""

    def before(self, call: Call, module: nn.Module, arguments: Arguments) -> None:
        """The module is about to run."""

    def after(self, call: Call, module: nn.Module, output: Any) -> None:  # noqa: ANN401 - any output of a module
        """The module has run."""


@dataclass
class ModuleTracer:
    """State shared by the hooks of one `trace_modules`; while closed, they neither count nor report calls."""

    counts: Counter[str]
    open: bool = True

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Context for calls that do not belong to the pass."""
        before, self.open = self.open, False
        try:
            yield
        finally:
            self.open = before


@contextmanager
def trace_modules(
    model: nn.Module,
    receiver: ModuleEvents,
    *,
    prefix: str = "",
    counts: Mapping[str, int] | None = None,
    only: Container[str] | None = None,
) -> Iterator[ModuleTracer]:
    """Report the calls of `model` and of its submodules to `receiver`; the hooks are removed on exit.

    `prefix`: full name of `model`, if it is a submodule; `counts`: calls so far; `only`: names of modules to report.
    """
    tracer = ModuleTracer(Counter(counts or {}))
    with ExitStack() as hooks:
        for name, module in hookable_modules(model):
            full = ".".join(filter(None, (prefix, name)))
            if only is None or full in only:
                _hook(module, full, receiver, tracer, hooks)
        yield tracer


def hookable_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Names and modules without ScriptModules, which refuse hooks."""
    return [pair for pair in model.named_modules() if not isinstance(pair[1], torch.jit.ScriptModule)]


def _hook(module: nn.Module, name: str, receiver: ModuleEvents, tracer: ModuleTracer, hooks: ExitStack) -> None:
    running: list[Call] = []  # a stack: calls may be recursive

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if tracer.open:
            running.append(Call(name, tracer.counts[name]))
            tracer.counts[name] += 1
            receiver.before(running[-1], module, (args, kwargs))

    def after(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:  # noqa: ANN401
        if tracer.open:
            receiver.after(running.pop(), module, output)

    hooks.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
    hooks.enter_context(module.register_forward_hook(after))


def find_tensors(value: Any) -> dict[str, Tensor]:  # noqa: ANN401 - any output of a module
    """Tensors in a value by path, such as "[0]" or ".logits"; the path of a bare tensor is ""."""
    if isinstance(value, Tensor):
        return {"": value}
    found: dict[str, Tensor] = {}
    for path, leaf in tree_flatten_with_path(value)[0]:
        if isinstance(leaf, Tensor):
            found[keystr(path)] = leaf
        else:
            for name, part in _parts_of(leaf):
                found |= {f"{keystr(path)}{name}{rest}": tensor for rest, tensor in find_tensors(part).items()}
    return found


def find_real_tensors(value: Any) -> dict[str, Tensor]:  # noqa: ANN401 - any output of a module
    """`find_tensors`, with complex ones as pairs of real numbers."""
    return {path: as_real(tensor) for path, tensor in find_tensors(value).items()}


def _parts_of(leaf: object) -> list[tuple[str, Any]]:
    """Path and value of each part of a dataclass or mapping; pytree treats both as leaves, except dict itself."""
    if isinstance(leaf, MutableMapping):
        return [(f"[{key!r}]", part) for key, part in leaf.items()]
    return [(f".{one.name}", getattr(leaf, one.name)) for one in fields(leaf)] if _is_record(leaf) else []


def map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:  # noqa: ANN401 - the same structure
    """Apply `change` to every tensor in a value, in the order of `find_tensors`."""

    def change_leaf(leaf: Any) -> Any:  # noqa: ANN401
        if isinstance(leaf, Tensor):
            return change(leaf)
        if isinstance(leaf, MutableMapping):
            filled = copy.copy(leaf)
            for key, part in leaf.items():
                filled[key] = map_tensors(change, part)
            return filled
        if not _is_record(leaf):
            return leaf
        changed = copy.copy(leaf)
        for one in fields(leaf):
            object.__setattr__(changed, one.name, map_tensors(change, getattr(leaf, one.name)))  # it may be frozen
        return changed

    return tree_map(change_leaf, value)


def copy_arguments(arguments: Arguments) -> Arguments:
    """Clone tensors, deep-copy caches and other plain objects: a module may write into its arguments."""
    return cast("Arguments", tree_map(_copy_leaf, map_tensors(Tensor.clone, arguments)))


def _copy_leaf(leaf: Any) -> Any:  # noqa: ANN401
    if isinstance(leaf, Tensor | nn.Module | type) or callable(leaf) or not hasattr(leaf, "__dict__"):
        return leaf
    try:
        return copy.deepcopy(leaf)
    except TypeError:  # a lock or a file cannot be copied
        return leaf


def _is_record(leaf: object) -> "TypeGuard[DataclassInstance]":
    """Whether it is a dataclass instance, which pytree treats as a leaf."""
    return is_dataclass(leaf) and not isinstance(leaf, type)


class OwnHook:
    """A hook; copied or pickled with its module, as in an average of weights or `torch.save`, it does nothing."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def __call__(self, *args: Any) -> Any:  # noqa: ANN401 - any arguments and result of a hook
        """Run it."""
        return self._run(*args)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, str]]:
        """A function of the standard library that takes any arguments and returns None."""
        return getattr, (nullcontext(), "__exit__")


class EagerHook(OwnHook):
    """A hook that torch.compile does not trace: the module is compiled in parts, before and after its hooks."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__(torch.compiler.disable(run) if "torch._dynamo" in sys.modules else run)
