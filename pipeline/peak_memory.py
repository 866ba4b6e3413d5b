"""The peak of this process's resident memory."""

import resource
import sys
from contextlib import suppress
from pathlib import Path

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def start_measuring() -> None:
    """Free the memory of earlier stages and reset the peak."""
    from models.loading import release_freed_memory  # noqa: PLC0415 - loads torch

    release_freed_memory()
    with suppress(OSError):  # macOS has no such file: there the peak is that of the whole process
        CLEAR_REFS.write_text("5")


def peak_bytes() -> int:
    """Highest resident memory since `start_measuring`, in bytes."""
    if STATUS.exists():
        line = next(line for line in STATUS.read_text(encoding="utf-8").splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
