"""How weights reach a GPU, and what its host does meanwhile."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")
Fetched = TypeVar("Fetched")


def send(tensor: Tensor, device: torch.device | str, dtype: torch.dtype) -> Tensor:
    """The tensor, contiguous, on a device and in a number format.

    What goes to a GPU is copied from pinned memory and cast there; torch would cast it on the CPU, and send the wider
    numbers from pageable memory.
    """
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        tensor = pinned(tensor, device).to(device, non_blocking=True)
    return tensor.to(device, dtype).contiguous()


def pinned(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The tensor, for a GPU in pinned memory, from which copies do not wait."""
    if torch.device(device).type != "cuda" or tensor.is_pinned():
        return tensor
    with torch.cuda.device(device):  # the first call opens a context on the current one
        return tensor.pin_memory()


def in_order(calls: Iterable[Callable[[], Fetched]], threads: int, ahead: int) -> Iterator[Fetched]:
    """Results of the calls in their order, up to `ahead` of them running in threads, or waiting, at once."""
    with ThreadPoolExecutor(threads) as pool:
        running: deque[Future[Fetched]] = deque()
        for call in calls:
            running.append(pool.submit(call))
            if len(running) == ahead:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()


def fetch_ahead(
    fetch: Callable[[Item], Fetched], items: Iterable[Item], device: torch.device
) -> Iterator[tuple[Item, Fetched]]:
    """Each item with what `fetch` gives for it: with a GPU, a thread fetches the next one while this one is used.

    Memory: with a GPU, two results.
    """
    calls = (partial(lambda item: (item, fetch(item)), item) for item in items)
    # Without a GPU, the thread would take the cores that compute.
    yield from in_order(calls, 1, 2) if device.type == "cuda" else (call() for call in calls)
