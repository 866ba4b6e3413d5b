"""Passes and gradients seen from inside the autograd graph."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def in_backward() -> bool:
    """Whether this thread runs a backward pass, as it does while a checkpointed forward pass is run again."""
    return torch._C._current_graph_task_id() != -1


class _Watch(torch.autograd.Function):
    """Identity; hands the gradient, with what the forward pass saved, to `receive`."""

    @staticmethod
    def forward(ctx: Any, receive: Callable[..., None], value: Tensor, *saved: Tensor) -> Tensor:  # noqa: ANN401 - autograd's context
        ctx.receive = receive
        ctx.save_for_backward(*saved)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401 - autograd's context
        saved = ctx.saved_tensors  # once: under gradient checkpointing a second look is an error
        if torch.is_autocast_enabled(grads[0].device.type):
            # A backward pass called inside an autocast region would multiply in half precision.
            with torch.no_grad(), torch.autocast(grads[0].device.type, enabled=False):
                ctx.receive(grads[0], *saved)
        else:
            with torch.no_grad():
                ctx.receive(grads[0], *saved)
        return (None, grads[0], *([None] * len(saved)))


def watch(receive: Callable[..., None], value: Tensor, *saved: Tensor) -> Tensor:
    """`value` itself, whose gradient will go to `receive(gradient, *saved)`, once for every backward pass.

    Gradient checkpointing, which runs the forward pass twice, still runs a Function's backward once; what is saved here
    is dropped and recomputed as everything else is.
    """
    watched: Tensor = _Watch.apply(receive, value, *saved)
    return watched
