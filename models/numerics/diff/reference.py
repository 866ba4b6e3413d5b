"""The FP32 reference of a model, and the arguments it is called with."""

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from models.numerics.diff.calls import Arguments
from models.numerics.nested import find_tensors, map_tensors


@contextmanager
def reference_of(model: nn.Module) -> Iterator[nn.Module]:
    """The model itself in evaluation mode where it computes in FP32 already, else an FP32 copy of it."""
    held = [tensor for tensor in chain(model.parameters(), model.buffers()) if tensor.is_floating_point()]
    if any(torch.finfo(tensor.dtype).bits < 32 for tensor in held):
        yield copy.deepcopy(model).float().eval()
        return
    training = {module: module.training for module in model.modules()}
    try:
        yield model.eval()
    finally:
        for module, flag in training.items():
            module.training = flag


def device_of(model: nn.Module, sample: Any) -> torch.device:  # noqa: ANN401 - any arguments
    """Where the model lies; of one without parameters, the sample."""
    for tensor in chain(model.parameters(), model.buffers(), find_tensors(sample).values()):
        return tensor.device
    return torch.device("cpu")


def arguments_of(
    model: nn.Module, sample: Mapping[str, Any] | Sequence[Any] | Tensor, device: torch.device
) -> Arguments:
    """Positional and keyword arguments, floating-point tensors in FP32; no key-value cache, which a module fills."""
    if isinstance(sample, Tensor):
        sample = (sample,)
    args, kwargs = ((), dict(sample)) if isinstance(sample, Mapping) else (tuple(sample), {})
    if "use_cache" in inspect.signature(model.forward).parameters:
        kwargs.setdefault("use_cache", False)

    def place(tensor: Tensor) -> Tensor:
        return tensor.to(device, torch.float32 if tensor.is_floating_point() else tensor.dtype)

    placed: Arguments = map_tensors(place, (args, kwargs))
    return placed
