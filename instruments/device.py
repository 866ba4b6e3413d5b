"""What differs on a GPU: the time to start an operator, memory of its own, and products rounded to TF32."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Types of devices that start an operator at once. On others it takes the host 5 to 25 µs, whatever the operator's size,
# so that a few large products are faster than many small ones. Tests remove the CPU.
HOSTS = {"cpu"}


def is_launch_bound(device: torch.device) -> bool:
    """Whether starting an operator on the device usually takes longer than the operator."""
    return device.type not in HOSTS


def free_device_memory(device: torch.device) -> int | None:
    """Bytes that tensors could take on a GPU; None if its module does not tell, and for the CPU."""
    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return None
    kept = module.memory_reserved(device) - module.memory_allocated(device)  # by torch, of freed tensors
    return int(module.mem_get_info(device)[0] + kept)


_allowed = {"tf32": True}  # a dict, since it is set for the life of a process


def allow_tf32(*, allowed: bool) -> None:
    """Whether `tf32` has an effect from now on: the setting `model.tf32`."""
    _allowed["tf32"] = allowed


@contextmanager
def tf32(*, use: bool = True) -> Iterator[None]:
    """Let a GPU round the factors of fp32 matrix products to 10 bits of mantissa, for up to eight times the speed.

    For moments, router fits, layer-wise descent and norms of gradients in half precision, whose results it does not
    change. Products on which a choice depends (routing, validation errors) and those that are reported stay outside, or
    inside of `use=False`.
    """
    matmul = torch.backends.cuda.matmul
    # torch 2.9 and later warn of the older name.
    newer = hasattr(matmul, "fp32_precision")
    name, values = ("fp32_precision", ("ieee", "tf32")) if newer else ("allow_tf32", (False, True))
    before = getattr(matmul, name)
    setattr(matmul, name, values[use and _allowed["tf32"]])
    try:
        yield
    finally:
        setattr(matmul, name, before)
