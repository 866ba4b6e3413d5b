"""Resolves the dials to the shape of a carve."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from models.config import PER_LAYER, MoEShape
from models.targets.base import MoETarget
from models.targets.config import ParameterCount, count_carved, select_target
from stages.assemble.config import AssembleConfig

# Default share of always-on neurons: the smaller of this share of the FFN and this share of its active neurons.
ALWAYS_ON_SHARE, ALWAYS_ON_SHARE_OF_ACTIVE = 0.24, 0.48
# Neurons of an expert: kernels need at least 64, and larger experts lose more quality. Widths are multiples of 8.
EXPERT_WIDTH, WIDTH_STEP = 64, 8
POOL_EXPERTS, POOL_EXPERT_WIDTH = 100, 256


@dataclass(frozen=True)
class ShapeRequest:
    """The shape that the user requested; None is filled in from the source's FFN width.

    Advice reads `assemble` and `source`; dense layers read `source` only.
    """

    experts: int | None
    n: int | None
    top_k: int | None
    always_on: int | None
    active: float
    topology: str = PER_LAYER
    assemble: AssembleConfig = field(default_factory=AssembleConfig)
    source: Mapping[str, Any] = field(default_factory=dict)  # its config.json
    dense_layers: tuple[int, ...] = ()

    @property
    def pooled(self) -> bool:
        """Whether all layers share one pool of experts."""
        return self.topology != PER_LAYER

    @property
    def width(self) -> int:
        """F of the source."""
        return int(self.source["intermediate_size"])

    @property
    def layers(self) -> int:
        """L of the source."""
        return int(self.source["num_hidden_layers"])

    @property
    def carved_share(self) -> float:
        """The active share of a carved layer: the average over all layers, dense ones included, is `active`."""
        dense = len(self.dense_layers)
        return self.active if not dense else (self.active * self.layers - dense) / max(1, self.layers - dense)

    def target(self, shape: MoEShape) -> MoETarget:
        """The architecture of the carved model. Raises ConfigError: it cannot express this source or shape."""
        model_type = str(self.source["model_type"])
        return select_target(model_type, self.assemble.target, shape.always_on, pooled=shape.pooled)

    def count(self, shape: MoEShape) -> ParameterCount:
        """Parameters of the carved model. Raises ConfigError, as `target` does."""
        return count_carved(self.source, self.target(shape), shape, self.assemble.pad_to)


def resolve_shape(dials: ShapeRequest, width: int) -> MoEShape:
    """Fill in the missing dials, so that on average over the layers about `active`·F neurons serve each token.

    Experts: see `fill_experts`. With neither top_k nor always_on given:

    - Experts do not cover the FFN (E·N < F): the other neurons are always on, so each neuron has one place, and top_k
      is the largest that fits. In a layer of Qwen2.5-Coder-0.5B, half active, this lost least (relative error on
      WikiText-2: 20 of 58 of 64 and 1152 always on .166; 8 and 1920 .174; 38 of 76 and none .181).
    - Experts cover the FFN exactly, or fewer than 2 would fit with all other neurons always on: experts get half of the
      active width, always-on neurons the other half. top_k is the largest power of two (a folded scale then is exact in
      bf16) that fits, at least 2 if 2 fit, at most half of the experts. Neurons without a place are dropped.
    - Experts overlap (E·N > F): top_k is 1, since neurons shared by several chosen experts would be computed twice (in
      the same layer, 100 of 256: 5 chosen .262, 2 .194, 1 .181).

    With top_k given, always-on neurons fill the active width. With always_on given, experts fill it: as many as fit, or
    half of them if all would fit. A pool chooses a power of two of its experts and has no always-on neurons by default,
    since each layer's own always-on neurons would be the larger part of the model.
    """
    experts, n = fill_experts(dials, width)
    active, top_k, always_on = round(dials.carved_share * width), dials.top_k, dials.always_on
    if dials.pooled:
        always_on = always_on or 0
        if top_k is None:
            top_k = min(max(2, largest_power_of_two((active - always_on) // n)), experts)
    elif top_k is not None:
        always_on = max(0, active - top_k * n) if always_on is None else always_on
    elif always_on is not None:
        fitting = (active - always_on) // n
        top_k = max(1, fitting if fitting < experts else experts // 2)
    else:
        top_k, always_on = _fill_both(experts, n, active, width)
    return MoEShape(experts, n, top_k, always_on, dials.topology, dials.dense_layers)


def _fill_both(experts: int, n: int, active: int, width: int) -> tuple[int, int]:
    rest = width - experts * n
    if 0 < rest <= active - 2 * n:
        return (active - rest) // n, rest
    if rest < 0:
        top_k = 1
    else:
        fitting = max(largest_power_of_two(active // 2 // n), min(2, active // n))
        top_k = max(1, min(fitting, experts // 2))
    return top_k, max(0, active - top_k * n)


def fill_experts(dials: ShapeRequest, width: int) -> tuple[int, int]:
    """Number and width of the experts.

    Without a given number, experts leave about a quarter of the FFN always on, at most half of the active width. With a
    given number but no width, each gets an equal part of the neurons that are not always on. The default width is 64,
    or less if four experts of 64 do not fit the active width.
    """
    if dials.pooled:
        return dials.experts or POOL_EXPERTS, dials.n or POOL_EXPERT_WIDTH
    routed = width * (1 - min(ALWAYS_ON_SHARE, ALWAYS_ON_SHARE_OF_ACTIVE * dials.active))
    if dials.experts is not None:
        return dials.experts, dials.n or _round_to_step(routed / dials.experts, width // dials.experts)
    n = dials.n or min(EXPERT_WIDTH, max(1, largest_power_of_two(round(dials.carved_share * width) // 4)))
    return max(1, min(round(routed / n), width // n)), n


def _round_to_step(n: float, at_most: int) -> int:
    """The multiple of 8 closest to n and at most `at_most`; a smaller number if there is none."""
    stepped = round(n / WIDTH_STEP) * WIDTH_STEP
    if stepped > at_most:
        stepped -= WIDTH_STEP
    return stepped or max(1, min(round(n), at_most))


def largest_power_of_two(bound: int) -> int:
    """The largest power of two <= bound, or 0."""
    return 1 << (bound.bit_length() - 1) if bound > 0 else 0
