"""What a CPU can do, without importing torch."""

from functools import cache
from pathlib import Path

FACTS = Path("/proc/cpuinfo")  # tests have another file


@cache
def has_amx() -> bool:
    """Whether the CPU has matrix units for bfloat16 (Intel's AMX), which multiply four to six times as fast as fp32.

    AVX512-BF16 alone does not count: oneDNN rounds no fp32 product there, and batches are generated faster in fp32.
    """
    try:
        return "amx_bf16" in FACTS.read_text(encoding="utf-8")
    except OSError:  # torch uses them on Linux alone
        return False
