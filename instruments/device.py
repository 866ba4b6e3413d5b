"""What differs between devices: the time to start an operator, a GPU's own memory, and products of rounded factors."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any

import torch

from instruments.cpu import has_amx

# Types of devices that start an operator at once. Others need 5 to 25 µs of the host for each operator of any size, so
# that a few large products are faster than many small ones. Tests remove the CPU.
HOSTS = {"cpu"}


_allowed = {"rounded": True}  # a dict, since it is set for the life of a process


def is_launch_bound(device: torch.device) -> bool:
    """Whether starting an operator on the device usually takes longer than the operator."""
    return device.type not in HOSTS


def prefers_large_products(device: torch.device) -> bool:
    """Whether a few large products are faster than many small ones with half of the multiplications.

    On a GPU, and on a CPU whose products are rounded: AMX needs large ones.
    """
    return is_launch_bound(device) or (device.type == "cpu" and has_amx() and _allowed["rounded"])


def free_device_memory(device: torch.device) -> int | None:
    """Bytes that tensors could take on a GPU; None if its module does not tell, and for the CPU."""
    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return None
    kept = module.memory_reserved(device) - module.memory_allocated(device)  # by torch, of freed tensors
    return int(module.mem_get_info(device)[0] + kept)


def allow_rounded_products(*, allowed: bool) -> None:
    """Whether `rounded_products` has an effect from now on: the setting `model.rounded_products`."""
    _allowed["rounded"] = allowed


@contextmanager
def rounded_products(*, use: bool = True, on: Collection[str] = ("cuda", "cpu")) -> Iterator[None]:
    """Let a device round the factors of fp32 matrix products: a GPU to TF32, a CPU with AMX to bfloat16.

    Products are four to eight times as fast; sums stay fp32. For moments, router fits, layer-wise descent and norms of
    gradients in half precision, whose results it does not change; on a CPU also for passes of the dense model, which a
    GPU computes in half precision, and for gradient projection where the KL hardly changes. Products that choose
    experts, and losses that are reported, stay outside, or inside of `use=False`.
    Devices other than those in `on` go on as they do. torch has one format for all threads: while several are inside,
    products are exact if one of them asks for it, and behind the last they are as before the first.
    """
    wish = use and _allowed["rounded"]
    for kind in on:
        _change(kind, wish, 1)
    try:
        yield
    finally:
        for kind in on:
            _change(kind, wish, -1)


_lock, _wishes = Lock(), {kind: {True: 0, False: 0} for kind in ("cuda", "cpu")}  # how many are inside, by their wish
_before: dict[str, object] = {}  # formats outside


def _change(kind: str, wish: bool, by: int) -> None:
    """Count one more, or one less, who wishes a device's products rounded, or exact, and set their format."""
    with _lock:
        for owner, exact, rounded in _formats(kind):
            if not any(_wishes[kind].values()):
                _before[kind] = owner.fp32_precision
            _wishes[kind][wish] += by
            found = exact if _wishes[kind][False] else rounded if _wishes[kind][True] else _before[kind]
            owner.fp32_precision = found


@cache
def _formats(kind: str) -> list[tuple[Any, str, str]]:
    """Where torch holds the format of a device's products, and its values for fp32 and for fewer bits."""
    if kind == "cuda":
        return [(torch.backends.cuda.matmul, "ieee", "tf32")]
    return [(torch.backends.mkldnn.matmul, "ieee", "bf16")] if has_amx() else []  # type: ignore[attr-defined]
