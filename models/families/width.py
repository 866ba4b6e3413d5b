"""Widths on disk: what was carved, filled up with zero units to what kernels and architectures can take.

A zero unit adds exactly nothing, and its gradient is zero too.
"""

from models.families.moe import MoETarget
from models.shape import Shape

# Grouped matrix kernels want rows of 16 bytes: 8 numbers in half precision. Fused kernels of serving runtimes are at
# their fastest from 128 on, llama.cpp's K-quants want 256.
ALIGNMENT = 8


def expert_width(shape: Shape, pad_to: int = ALIGNMENT) -> int:
    """Neurons of an expert on disk: N, rounded up to a multiple of `pad_to`."""
    return _round_up(shape.n, pad_to)


def shared_width(target: MoETarget, shape: Shape, pad_to: int = ALIGNMENT) -> int:
    """Neurons of the always-on FFN on disk; 0 where the architecture has none, or can leave it out."""
    match target.model_type:
        case "qwen2_moe":
            # It always has one.
            return _round_up(max(1, shape.always_on), pad_to)
        case "glm4_moe":
            # Its config counts shared experts, each as wide as a routed one.
            width = expert_width(shape, pad_to)
            return max(1, -(-shape.always_on // width)) * width
        case "granitemoeshared" | "tiny_onn":
            return _round_up(shape.always_on, pad_to)
    return 0


def _round_up(width: int, pad_to: int) -> int:
    return -(-width // pad_to) * pad_to
