"""What a CPU can do, without importing torch."""

from functools import cache
from pathlib import Path

FACTS = Path("/proc/cpuinfo")  # tests have another file


@cache
def has_amx() -> bool:
    """Whether the CPU has matrix units for bfloat16 (Intel's AMX), which multiply four to six times as fast as fp32."""
    return "amx_bf16" in _flags()


def multiplies_bfloat16() -> bool:
    """Whether products of bfloat16 tensors are faster than of fp32: with AMX, or twice as fast with AVX512-BF16."""
    return bool({"amx_bf16", "avx512_bf16"} & {*_flags()})


def _flags() -> list[str]:
    try:
        return FACTS.read_text(encoding="utf-8").split()
    except OSError:  # torch uses them on Linux alone
        return []
