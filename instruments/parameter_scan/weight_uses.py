"""Find uses of watched weights that the hooks on their modules do not see."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from instruments.hooks import EagerHook
from instruments.parameter_scan.targets import Target
from instruments.transformers_layers import conv1d_kind

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
                begin, end = partial(self._begin_module, target), partial(self._end_module, target)
                yield module.register_forward_pre_hook(EagerHook(begin))
                yield module.register_forward_hook(EagerHook(end), always_call=True)

    def _begin_module(self, target: Target, *_: object) -> None:
        self._running.add(target)

    def _end_module(self, target: Target, *_: object) -> None:
        self._running.discard(target)

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


def has_own_forward(module: nn.Module) -> bool:
    """Whether a class other than Linear and Conv1D computes the output, from a weight that is not quantised."""
    forward = type(module).forward
    weight = module._parameters.get("weight")
    if forward.__module__.startswith("bitsandbytes.") or (weight is not None and weight.element_size() == 1):
        return False
    return forward not in {nn.Linear.forward, getattr(conv1d_kind(), "forward", None)}


@torch.no_grad()
def computes_linear(module: Any, x: Tensor, output: Tensor) -> bool:  # noqa: ANN401 - a Linear
    """Whether a Linear with its own forward returns x·Wᵀ + b up to rounding, so that the norms are the weight's."""
    weight = module._parameters.get("weight")
    if weight is None or weight.shape != (output.shape[-1], x.shape[-1]):
        return False
    expected = linear(x.to(weight.dtype), weight, module.bias)
    coarse = min(expected.dtype.itemsize, output.dtype.itemsize) < torch.float32.itemsize
    error = torch.linalg.vector_norm(output.float() - expected.float())
    return bool(error <= (1e-2 if coarse else 1e-4) * torch.linalg.vector_norm(expected.float()))
