"""Experts of transformers, whose Linear layers are fused into one 3-D parameter: input, weight and output gradient.

Such a parameter is no module; here it is a Linear layer of its own, `...mlp.experts.gate_up_proj`. While its experts
run, matrix products are looked at before they are done, whichever implementation does them:

- grouped_mm: one product for all experts, their rows one expert after the other; the weight is the whole parameter;
- batched_mm: likewise, rows in the order of the tokens' choices;
- eager: a product, and so a call, for each expert that was chosen; the weight is that expert's.

`expert` is the expert of each row; a number past the last one is of rows that another process computes. Others
(deepgemm, sonicmoe) multiply where nothing can look: their layers are reported as having never fired.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from instruments.tensor_dump.config import BACKWARD, EXPERTS
from instruments.tensor_dump.recorder import Call, Recorder
from instruments.tensor_dump.watched import Part, Watched, layer_of

_GROUPED = {
    getattr(place, name)
    for place, name in ((torch.nn.functional, "grouped_mm"), (torch, "_grouped_mm"))
    if hasattr(place, name)
}


def find_experts(root: nn.Module, prefix: str) -> Iterator[Watched]:
    """Every fused parameter of modules that transformers gives a choice of experts implementations."""
    for name, module in root.named_modules(prefix=prefix):
        if hasattr(type(module), "_apply_gate") and hasattr(module, "is_transposed"):
            for own in _fused(module):
                yield Watched(f"{name}.{own}", module, EXPERTS, layer_of(name), parameter=own)


def _fused(module: nn.Module) -> list[str]:
    return [name for name, parameter in module.named_parameters(recurse=False) if parameter.ndim == 3]


def watch_experts(watched: Watched, recorder: Recorder) -> list[RemovableHandle]:
    """Hooks that look at the products of one parameter, from the beginning of its module to its end."""
    running: list[_Products] = []

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        chosen: Tensor = args[1] if len(args) > 1 else kwargs["top_k_index"]
        running.append(_Products(watched, recorder, chosen))
        running[-1].__enter__()

    def after(_module: nn.Module, _args: tuple[Any, ...], _output: object) -> None:
        if running:
            running.pop().__exit__(None, None, None)

    module = watched.module
    return [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, always_call=True),  # recomputation ends in the middle, with an exception
    ]


class _Products(TorchFunctionMode):
    """Looks at the products of one parameter in one call of its module."""

    def __init__(self, watched: Watched, recorder: Recorder, chosen_TK: Tensor) -> None:
        super().__init__()
        self._watched, self._recorder, self._chosen_TK = watched, recorder, chosen_TK
        self._weight: Tensor = getattr(watched.module, watched.parameter)
        self._turn = _fused(watched.module).index(watched.parameter)  # among batched products, which copy the weight
        self._batched = 0

    def __torch_function__(
        self, func: Callable[..., Any], _types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # noqa: ANN401 - whatever the function returns
        kwargs = kwargs or {}
        found = self._find(func, args, kwargs)
        call = self._recorder.begin_call(self._watched, found["input"]) if found else None
        if call is None:
            return func(*args, **kwargs)
        for name, tensor in found.items():
            self._recorder.take(call, name, tensor, Part.whole(tensor, None))
        output = func(*args, **kwargs)
        if output.requires_grad:
            output.register_hook(partial(self._take_gradient, call))
        return output

    def _find(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
        """What goes into a product of the parameter; nothing where it is something else."""
        if func is linear and self._holds(args[1]):
            rows, weight = args[:2]
            expert = (weight.storage_offset() - self._weight.storage_offset()) // self._weight.stride(0)
            return {"input": rows, "weight": weight, "expert": torch.full((len(rows),), expert, device=rows.device)}
        if func in _GROUPED and self._holds(args[1]):
            rows = torch.arange(len(args[0]), device=args[0].device)
            expert = torch.bucketize(rows, kwargs["offs"].long(), right=True)
            return {"input": args[0], "weight": self._weight, "expert": expert}
        if func is torch.bmm:
            self._batched += 1
            if self._batched == self._turn + 1:
                rows = args[0 if self._watched.module.is_transposed else 1]
                return {"input": rows.flatten(1), "weight": self._weight, "expert": self._chosen_TK.reshape(-1)}
        return {}

    def _holds(self, weight: Tensor) -> bool:
        return weight.untyped_storage().data_ptr() == self._weight.untyped_storage().data_ptr()

    def _take_gradient(self, call: Call, gradient: Tensor) -> None:
        rows = gradient.flatten(1)
        self._recorder.take(call, "grad_output", rows, Part.whole(rows, None), BACKWARD)
