"""Memory that was freed but not given back."""

import ctypes
import ctypes.util
import gc


def release_freed_memory() -> None:
    """Give freed heap blocks back to the system, where the C library is glibc; elsewhere do nothing.

    After many layers of odd-sized tensors glibc keeps hundreds of megabytes that the next phase would add to.
    """
    gc.collect()
    library = ctypes.CDLL(ctypes.util.find_library("c"))
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
