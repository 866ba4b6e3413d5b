"""Widths on disk: what was carved, filled up with zero units to what kernels and architectures can take.

A zero unit adds exactly nothing, and its gradient is zero too.
"""

from models.families.moe import MoETarget
from models.shape import Shape

# Grouped matrix kernels want rows of 16 bytes: 8 numbers in half precision.
ALIGNMENT = 8


def expert_width(shape: Shape) -> int:
    """Neurons of an expert on disk: N, rounded up."""
    return -(-shape.n // ALIGNMENT) * ALIGNMENT


def shared_width(target: MoETarget, shape: Shape) -> int:
    """Neurons of the shared expert on disk; 0 where the architecture has none, never 0 where it has."""
    match target.model_type:
        case "qwen2_moe":
            return shape.always_on or ALIGNMENT
        case "glm4_moe":
            # Its config counts shared experts, each as wide as a routed one.
            width = expert_width(shape)
            return max(1, -(-shape.always_on // width)) * width
    return 0
