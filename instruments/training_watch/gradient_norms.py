"""L2 norms of parameters' gradients, also sparse and sharded ones; when to look: at each step of an optimizer."""

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from instruments.tensors import as_real, is_sharded

MISSING = -1.0  # in place of the norm of a missing gradient


@torch.no_grad()
def gradient_norms(parameters: Sequence[nn.Parameter]) -> Tensor:
    """L2 norm of each of P parameters' gradients, `MISSING` without one, on the first gradient's device.

    Does not wait for the device. Shards of a DTensor are added up over the processes that hold them; all of these
    processes must call. Numerics: fp32 sums of squares, which overflow for finite gradients above 1e19; fp64 for fp64.
    """
    device = next((one.device for one in parameters if one.grad is not None), torch.device("cpu"))
    norms_P = torch.full((len(parameters),), MISSING, device=device)
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = defaultdict(list)
    for place, parameter in enumerate(parameters):
        if parameter.grad is not None:
            values = _local(parameter.grad)
            groups[values.device, values.dtype].append((place, values))
    for (_device, dtype), group in groups.items():
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        found = torch._foreach_norm([grad for _place, grad in group], 2, dtype=wide)
        norms_P[[place for place, _grad in group]] = torch.stack(found).to(norms_P)
    return _add_shards(parameters, norms_P)


def _local(grad: Tensor) -> Tensor:
    values: Tensor = grad.to_local() if is_sharded(grad) else grad
    # Repeated rows count as their sum.
    return as_real(values.coalesce().values() if values.is_sparse else values)


def _add_shards(parameters: Sequence[nn.Parameter], norms_P: Tensor) -> Tensor:
    meshes: Any = defaultdict(list)
    for place, parameter in enumerate(parameters):
        if is_sharded(parameter):
            for number, part in enumerate(parameter.placements):
                if part.is_shard():
                    meshes[parameter.device_mesh, number].append(place)
    for (mesh, number), places in meshes.items():
        mine = norms_P[places]
        squares = torch.stack([mine.clamp_min(0).square(), (mine != MISSING).float()])
        torch.distributed.all_reduce(squares, group=mesh.get_group(number))
        norms_P[places] = torch.where(squares[1] > 0, squares[0].sqrt(), MISSING)
    return norms_P


def is_finite(parameter: nn.Parameter) -> bool:
    """Whether the gradient is finite, so that only its norm overflowed."""
    if parameter.grad is None:  # a manual step has dropped it
        return False
    values = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
    return bool(values.isfinite().all())


def on_each_step(look: Callable[[Optimizer], None]) -> RemovableHandle:
    """Call the bound method `look` at every step of an optimizer, and do not keep its object alive.

    Before the step; if a closure computes the gradients, as with LBFGS and Lightning, after its first evaluation.
    """
    method = weakref.WeakMethod(look)

    def before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        closure: Any = args[1] if len(args) > 1 else kwargs.get("closure")
        waiting = [optimizer]

        def look_once() -> None:
            if waiting and (found := method()) is not None:
                found(waiting.pop())

        def evaluate(*given: Any, **named: Any) -> Any:  # noqa: ANN401 - any closure
            result = closure(*given, **named)
            look_once()
            return result

        if not callable(closure):
            look_once()
            return None
        return ((args[0], evaluate, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": evaluate})

    return register_optimizer_step_pre_hook(before_step)
