"""Memory: what was freed but not given back, and what there is not enough of."""

import ctypes
import ctypes.util
import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from models.errors import UserError


def release_freed_memory() -> None:
    """Give freed heap blocks back to the system, where the C library is glibc; elsewhere do nothing.

    After many layers of odd-sized tensors glibc keeps hundreds of megabytes that the next phase would add to.
    """
    gc.collect()
    library = ctypes.CDLL(ctypes.util.find_library("c"))
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


@contextmanager
def explained_memory(where: str, remedy: str) -> Iterator[None]:
    """Say what to lower where the device or the machine has no more memory. Raises UserError."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise UserError(f"out of memory: {str(error).splitlines()[0][:160]}", where=where, do=remedy) from error
    except RuntimeError as error:
        if "DefaultCPUAllocator" not in str(error):
            raise
        raise UserError(f"out of memory: {str(error).splitlines()[0][:160]}", where=where, do=remedy) from error
