"""What differs on a GPU: the time to start an operator, and memory of its own."""

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
