"""What differs on a GPU: the time to start an operator, and memory of its own."""

import torch

# Types of devices that start an operator at once. On others it takes the host 5 to 25 µs, whatever the operator's size,
# so that a few large products are faster than many small ones. Tests remove the CPU.
HOSTS = {"cpu"}


def is_launch_bound(device: torch.device) -> bool:
    """Whether starting an operator on the device usually takes longer than the operator."""
    return device.type not in HOSTS


def free_device_memory(device: torch.device) -> int | None:
    """Bytes that are free on a GPU; None if its module does not tell, and for the CPU."""
    ask = getattr(torch.get_device_module(device), "mem_get_info", None)
    return None if ask is None else int(ask(device)[0])
