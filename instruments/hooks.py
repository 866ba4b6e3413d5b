"""Hooks on modules: not copied with their model, always removed; the calls of all modules as events."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from instruments.errors import ConfigError


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


class _Inside(TorchFunctionMode):
    """Passes every torch function that a module calls to `run(func, args, kwargs)`."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(
        self, func: Callable[..., Any], _types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # noqa: ANN401 - any result of the function
        return self._run(func, args, kwargs or {})


@contextmanager
def look_inside(module: nn.Module, begin: Callable[..., Callable[..., Any] | None]) -> Iterator[None]:
    """Hooks; at each call of the module `begin(*args, **kwargs)` gives the runner of its torch functions, or None."""
    running: list[_Inside | None] = []

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        run = begin(*args, **kwargs)
        running.append(None if run is None else _Inside(run))
        if running[-1] is not None:
            running[-1].__enter__()

    def after(_module: nn.Module, _args: tuple[Any, ...], _output: object) -> None:
        if running and (inside := running.pop()) is not None:
            inside.__exit__(None, None, None)

    with (
        module.register_forward_pre_hook(EagerHook(before), with_kwargs=True),
        module.register_forward_hook(EagerHook(after), always_call=True),  # recomputation ends by an exception
    ):
        yield
    while running:  # Ctrl-C skips the hooks
        after(module, (), None)


def refuse_replica(model: nn.Module | None, where: str) -> None:
    """Raise ConfigError if nn.DataParallel runs it, as transformers' Trainer does with several GPUs."""
    if getattr(model, "_is_replica", False):
        what = "nn.DataParallel runs copies of the model in threads, whose calls cannot be told apart"
        raise ConfigError(what, where=where, do="torchrun, or one GPU: CUDA_VISIBLE_DEVICES=0")


WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, torch.compile or Megatron's Float16Module, with its plain names."""
    while len(inner := list(model.named_children())) == 1 and inner[0][0] in WRAPPERS:
        if next(model.parameters(recurse=False), None) is not None:  # a module of its own
            break
        model = inner[0][1]
    return model


def plain_name(name: str) -> str:
    """Remove the parts that FSDP, checkpointing and torch.compile insert into module names."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS[1:])


class Call(NamedTuple):
    """The n-th call of a module in one pass; `module` is its name, empty for the whole model."""

    module: str
    number: int

    def __str__(self) -> str:
        """The name, with a number from the second call on."""
        name = self.module or "(model)"
        return f"{name} (call {self.number + 1})" if self.number else name


# Called with the call, the module, and its arguments or its output; children finish before their parents.
_Event = Callable[[Call, nn.Module, Any], None]


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
    after: _Event,
    before: _Event | None = None,
    *,
    prefix: str = "",
    counts: Mapping[str, int] | None = None,
) -> Iterator[ModuleTracer]:
    """Report the calls of `model` and of its submodules; the hooks are removed on exit.

    `prefix`: full name of `model`, if it is a submodule; `counts`: calls so far.
    """
    tracer = ModuleTracer(Counter(counts or {}))
    with ExitStack() as hooks:
        for name, module in hookable_modules(model):
            _hook(module, ".".join(filter(None, (prefix, name))), before, after, tracer, hooks)
        yield tracer


def hookable_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Names and modules without ScriptModules, which refuse hooks."""
    return [pair for pair in model.named_modules() if not isinstance(pair[1], torch.jit.ScriptModule)]


def _hook(
    module: nn.Module, name: str, begin: _Event | None, end: _Event, tracer: ModuleTracer, hooks: ExitStack
) -> None:
    running: list[Call] = []  # a stack: calls may be recursive

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if tracer.open:
            running.append(Call(name, tracer.counts[name]))
            tracer.counts[name] += 1
            if begin is not None:
                begin(running[-1], module, (args, kwargs))

    def after(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:  # noqa: ANN401
        if tracer.open:
            end(running.pop(), module, output)

    hooks.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
    hooks.enter_context(module.register_forward_hook(after))
