"""What a router's gate multiplies an expert by, and the scale that undoes it.

With equal router logits every architecture gives its K chosen experts equal gates that sum to less than the dense FFN
would weigh them. The inverse goes into the down projections or, where the architecture has a factor, into its config.
"""

import math
from dataclasses import dataclass

from models.shape import MoEShape
from models.targets.base import MoETarget


@dataclass(frozen=True)
class GateScale:
    """Scales applied in fp32 when a checkpoint is written; powers of two change no mantissa."""

    down_scale: float  # routed experts' down
    shared_down_scale: float  # always-on neurons' down
    norm_topk_prob: bool | None  # None: the architecture has no such key
    routed_scaling_factor: float | None  # None: the architecture has no such key
    selection_bias_scale: float = 1.0  # of a bias that is added to logits, where the architecture adds it elsewhere


def gate_scale_of(target: MoETarget, shape: MoEShape) -> GateScale:
    """The fold of one target: with equal router logits the chosen experts weigh 1 each, the always-on neurons 1.

    Renormalised over one chosen expert, a gate is 1 whatever the logits, and a router learns from its load alone: with
    K = 1 gates are left as they are, where the architecture lets them.

    Numerics: exact in every number format when `down_scale` is a power of two; else products are made in fp32 and
    rounded once.
    """
    top_k, experts = float(shape.top_k), float(shape.experts)
    several = shape.top_k > 1
    match target.model_type:
        case "qwen3_moe":
            return GateScale(top_k, 1.0, norm_topk_prob=True, routed_scaling_factor=None)
        case "mixtral" | "granitemoe" | "granitemoeshared":
            return GateScale(top_k, 1.0, norm_topk_prob=None, routed_scaling_factor=None)
        case "qwen2_moe":
            # σ(0) = ½ halves the shared expert. A gate is 1/E: the family does not renormalise, and llama.cpp cannot.
            return GateScale(experts, 2.0, norm_topk_prob=False, routed_scaling_factor=None)
        case "flex_olmo":
            normalised = several and not is_power_of_two(shape.experts)
            return GateScale(top_k if normalised else experts, 1.0, normalised, routed_scaling_factor=None)
        case "glm4_moe":
            # It chooses by σ(z) + bias, and σ(z) = ½ + z/4 for the small logits of constant gates.
            return GateScale(1.0, 1.0, several, top_k if several else 2.0, selection_bias_scale=0.25)
        case "tiny_onn":
            return GateScale(1.0, 1.0, several, top_k if several else 2.0)
    raise AssertionError(f"no fold for {target.model_type}")


def gate_kind(target: MoETarget, shape: MoEShape) -> str:
    """How the target turns logits into gates: a value of `models.routing.GateKind`, which loads torch."""
    normalised = gate_scale_of(target, shape).norm_topk_prob is not False
    # The project's own class can do either: sigmoids of logits as large as training wants differ least.
    if target.model_type in {"glm4_moe", "tiny_onn"}:
        return "sigmoid_of_chosen" if normalised else "sigmoid"
    return "softmax_of_chosen" if normalised else "softmax_of_all"


def is_power_of_two(number: float) -> bool:
    """1, 2, 4, 8 ..."""
    return number >= 1 and math.frexp(number)[0] == 0.5


# Grouped matrix kernels want rows of 16 bytes: 8 numbers in half precision. Fused kernels of serving runtimes are at
# their fastest from 128 on, llama.cpp's K-quants want 256.
ALIGNMENT = 8


def expert_width(shape: MoEShape, pad_to: int = ALIGNMENT) -> int:
    """Neurons of an expert on disk: N, rounded up to a multiple of `pad_to`."""
    return _round_up(shape.n, pad_to)


def shared_width(target: MoETarget, shape: MoEShape, pad_to: int = ALIGNMENT) -> int:
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
