"""What a CPU can do, without importing torch."""

from functools import cache
from pathlib import Path

FACTS = Path("/proc/cpuinfo")  # tests have another file


@cache
def has_amx() -> bool:
    """Whether the CPU has matrix units for bfloat16 (Intel's AMX), which multiply four to six times as fast as fp32.

    AVX512-BF16 alone does not count: oneDNN rounds no fp32 product there, and batches are generated faster in fp32.
    """
    return "amx_bf16" in _facts()


def lacks_bfloat16() -> bool:
    """Whether this is an x86 CPU on which oneDNN has no bfloat16 products: a layer takes ten times as long as in fp32.

    Square matrices of 2,048 take 370 times as long. oneDNN asks for AVX-512, or AVX2 with conversions.
    """
    facts = _facts()
    return " avx2 " in facts and "avx512bw" not in facts and "avx_ne_convert" not in facts


def _facts() -> str:
    try:
        return FACTS.read_text(encoding="utf-8")
    except OSError:  # torch uses AMX on Linux alone
        return ""
