"""Gradient norms and output maxima of a step, left on the device."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from instruments.autograd import in_backward
from instruments.errors import ConfigError
from instruments.precision.calls import find_tensors

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
