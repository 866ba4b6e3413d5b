"""Layers of transformers that torch lacks: Conv1D, and fused experts, whose weights form one 3-D parameter."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

_GROUPED = {
    getattr(place, name)
    for place, name in ((torch.nn.functional, "grouped_mm"), (torch, "_grouped_mm"))
    if hasattr(place, name)
}


def _is_grouped(func: Callable[..., Any]) -> bool:
    """Whether it is a grouped product; for GPUs before Ampere, transformers has one of its own."""
    return func in _GROUPED or getattr(func, "__name__", "") == "grouped_mm_fallback"


def fused_parameters(module: nn.Module) -> list[str]:
    """Names of the module's fused expert parameters in the order of their use; [] for other modules."""
    if not (hasattr(type(module), "_apply_gate") and hasattr(module, "is_transposed")):
        return []
    return [name for name, parameter in module.named_parameters(recurse=False) if parameter.ndim == 3]


class ProductFinder:
    """Finds the products of one parameter among the functions that its module calls, in one call of the module."""

    def __init__(self, module: nn.Module, parameter: str, chosen_TK: Tensor) -> None:
        """`chosen_TK` holds the experts of every token."""
        self.weight: Tensor = getattr(module, parameter)
        self._chosen_TK, self._transposed = chosen_TK, bool(module.is_transposed)
        self._turn = fused_parameters(module).index(parameter)  # position among batched products, which copy the weight
        self._batched = 0

    def find(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
        """Input (rows, I), weight and each row's expert if `func` is a product of the parameter; else {}."""
        if func is linear and self._holds(args[1]):
            rows, weight = args[:2]
            expert = (weight.storage_offset() - self.weight.storage_offset()) // self.weight.stride(0)
            return {"input": rows, "weight": weight, "expert": torch.full((len(rows),), expert, device=rows.device)}
        if _is_grouped(func) and self._holds(args[1]):
            rows = torch.arange(len(args[0]), device=args[0].device)
            expert = torch.bucketize(rows, kwargs["offs"].long(), right=True)
            return {"input": args[0], "weight": self.weight, "expert": expert}
        if func is torch.bmm:
            self._batched += 1
            if self._batched == self._turn + 1:
                rows = args[0 if self._transposed else 1]
                return {"input": rows.flatten(1), "weight": self.weight, "expert": self._chosen_TK.reshape(-1)}
        return {}

    def tokens(self, func: Callable[..., Any], expert_R: Tensor) -> Tensor:
        """The token of every row, in the row order of transformers' kernels."""
        top_k = self._chosen_TK.shape[-1]
        if func is linear:
            return torch.where((self._chosen_TK == expert_R[0]).mT)[1] if len(expert_R) else expert_R
        if _is_grouped(func):
            return self._chosen_TK.reshape(-1).argsort() // top_k
        return torch.arange(len(expert_R), device=expert_R.device) // top_k

    def _holds(self, weight: Tensor) -> bool:
        return weight.untyped_storage().data_ptr() == self.weight.untyped_storage().data_ptr()


def conv1d_kind() -> Any:  # noqa: ANN401 - a class, or () for isinstance without transformers
    """Conv1D, a Linear whose weight is (inputs, outputs); () while transformers is not imported."""
    return getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", ())
