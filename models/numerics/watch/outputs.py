"""The largest absolute value that every module puts out, in the order they run; left on the device."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from models.backward import in_backward
from models.numerics.nested import find_tensors
from models.numerics.watch.gradients import layer_of


@dataclass(frozen=True, eq=False)
class Peak:
    """Of one output; NaN where it holds any."""

    module: str
    dtype: torch.dtype
    value: Tensor


class OutputWatch:
    """Hooks on the modules that have no others inside."""

    def __init__(self, model: nn.Module) -> None:
        """Put them there."""
        self.peaks: list[Peak] = []  # since the last `take`
        self.handles: list[RemovableHandle] = [
            module.register_forward_hook(self._hook(name)) for name, module in find_leaves(model)
        ]

    def _hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(_module: nn.Module, _inputs: Any, output: Any) -> None:  # noqa: ANN401 - whatever a module returns
            # Not held-out text, nor what is computed once more in the backward pass.
            if torch.is_grad_enabled() and not in_backward():
                for tensor in _tensors(output):
                    value = largest(tensor)
                    self.peaks.append(Peak(name, tensor.dtype, value))

        return look

    def take(self) -> list[Peak]:
        """What was seen; the next step starts with nothing."""
        peaks, self.peaks = self.peaks, []
        return peaks

    def remove(self) -> None:
        """Take all hooks off."""
        for handle in self.handles:
            handle.remove()


def find_leaves(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules without modules of their own; the model itself where it has none."""
    for name, module in model.named_modules():
        if next(module.children(), None) is None:
            yield layer_of(f"{name}.") if name else type(module).__name__, module


def largest(tensor: Tensor) -> Tensor:
    """Of absolute values, in one pass that copies nothing; NaN where there is any."""
    low, high = torch.aminmax(tensor.detach())
    return torch.maximum(-low, high).float()


def _tensors(output: Any) -> Iterator[Tensor]:  # noqa: ANN401
    parts = [output] if isinstance(output, Tensor) else find_tensors(output).values()
    for part in parts:
        if part.is_floating_point() and part.numel() and not part.is_sparse:
            yield part
