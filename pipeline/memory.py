"""Peak memory of one stage among several in the same process."""

import ctypes
import gc
import resource
import sys
from contextlib import suppress
from pathlib import Path

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")


def start_measuring() -> None:
    """Give back what earlier stages left behind, and start measuring anew.

    Where the system cannot (macOS), the peak stays that of the whole process.
    """
    gc.collect()
    with suppress(AttributeError):  # glibc keeps freed memory for itself until asked
        ctypes.CDLL(None).malloc_trim(0)
    with suppress(OSError):
        CLEAR_REFS.write_text("5")


def peak_bytes() -> int:
    """Highest resident memory since `start_measuring`, in bytes."""
    if STATUS.exists():
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
