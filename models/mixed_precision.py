"""A MoE under autocast: its experts multiply in the autocast format, its routers in float32."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from models.training import find_routers

IMPLEMENTATION = "autocast_grouped_mm"  # as `from_pretrained` takes it for experts_implementation


class _CastExperts:
    """The attributes of `experts`, with weights in another number format."""

    def __init__(self, experts: nn.Module, dtype: torch.dtype) -> None:
        self._experts, self._dtype = experts, dtype

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any attribute
        value = getattr(self._experts, name)
        # No test for nn.Parameter: adapters compute the weights, which then are plain tensors.
        return value.to(self._dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def compute_grouped(
    self: nn.Module, x_TD: Float[Tensor, "T D"], chosen_TK: Int[Tensor, "T K"], gates_TK: Float[Tensor, "T K"]
) -> Float[Tensor, "T D"]:
    """As transformers' grouped_mm, which autocast does not cast: float32 weights would be multiplied in float32."""
    experts, device = self, x_TD.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        experts, x_TD = _CastExperts(self, dtype), x_TD.to(dtype)  # type: ignore[assignment]
    output_TD: Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](experts, x_TD, chosen_TK, gates_TK)
    return output_TD


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, compute_grouped)


def exempt_routers(model: nn.Module) -> None:
    """Exempt the routers from autocast, which would also round those that ask for float32: they choose otherwise."""
    for router in find_routers(model):
        router.forward = partial(_run_in_float32, router.forward)


def _run_in_float32(forward: Callable[..., Any], x: Tensor) -> Any:  # noqa: ANN401 - a router's outputs
    with torch.autocast(x.device.type, enabled=False):
        return forward(x.float() if x.dtype.itemsize < 4 else x)
