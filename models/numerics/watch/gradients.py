"""Norms of all gradients at once, left on the device."""

from collections import defaultdict
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from models.errors import ConfigError

MISSING = -1.0  # the norm of a gradient that is not there
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "module.")


@torch.no_grad()
def gradient_norms(parameters: Sequence[nn.Parameter]) -> Float[Tensor, "P"]:
    """L2 norm of each parameter's gradient, `MISSING` where there is none, on the first parameter's device.

    Nothing waits for the device. Shards of a DTensor are added up over the processes that hold them; all of them have
    to call. Numerics: fp32 sums of squares, which overflow for finite gradients above 1e19.
    """
    device = parameters[0].device
    norms_P = torch.full((len(parameters),), MISSING, device=device)
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = defaultdict(list)
    for place, parameter in enumerate(parameters):
        if parameter.grad is not None:
            values = _local(parameter.grad)
            groups[values.device, values.dtype].append((place, values))
    for group in groups.values():
        found = torch._foreach_norm([values for _place, values in group], 2, dtype=torch.float32)
        norms_P[[place for place, _values in group]] = torch.stack(found).to(device)
    return _add_shards(parameters, norms_P)


def _local(grad: Tensor) -> Tensor:
    values = grad.to_local() if isinstance(grad, DTensor) else grad
    # Rows that occur several times count as their sum.
    return values.coalesce().values() if values.is_sparse else values


def _add_shards(parameters: Sequence[nn.Parameter], norms_P: Tensor) -> Tensor:
    meshes = defaultdict(list)
    for place, parameter in enumerate(parameters):
        if isinstance(parameter, DTensor) and any(part.is_shard() for part in parameter.placements):
            for number, part in enumerate(parameter.placements):
                if part.is_shard():
                    meshes[parameter.device_mesh, number].append(place)
    for (mesh, number), places in meshes.items():
        mine = norms_P[places]
        squares = torch.stack([mine.clamp_min(0).square(), (mine != MISSING).float()])
        torch.distributed.all_reduce(squares, group=mesh.get_group(number))
        norms_P[places] = torch.where(squares[1] > 0, squares[0].sqrt(), MISSING)
    return norms_P


def refuse_flat_shards(model: nn.Module) -> None:
    """Raises ConfigError: FSDP's first generation flattens parameters; layers have no gradients of their own."""
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise ConfigError(
            "the model is sharded by FullyShardedDataParallel, whose flat parameters hide the layers",
            where="watch_model",
            do="shard with torch.distributed.fsdp.fully_shard, or watch the model without sharding",
        )


def layer_of(name: str) -> str:
    """The module that owns a parameter, without the names that wrappers put before it."""
    for wrapper in _WRAPPERS:
        name = name.removeprefix(wrapper) if wrapper == "module." else name.replace(wrapper, "")
    return name.rpartition(".")[0] or name
