"""One layer's projection: each step is tried, judged on held-out tokens, and kept or dropped."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from models.expert_loop import ExpertLoop
from models.experts import LayerExperts
from models.ffn import DenseFFN
from models.routing import has_copies
from models.shape import Shape
from stages.calibration.alignment import Target, align_down, relative_error, split_guard
from stages.calibration.carved_ffn import replica_scale, routed_copies
from stages.project.config import ProjectConfig
from stages.project.gradient_projection import draw_experts, project_experts, slice_ffn


@dataclass(frozen=True)
class LayerCarve:
    """What the earlier stages decided for one layer."""

    ffn: DenseFFN
    units_EN: Tensor
    always_S: Tensor
    rows_ED: Tensor
    shape: Shape


@dataclass(frozen=True)
class Outcome:
    """A layer after projection; errors are relative, on guard tokens, of the step named."""

    error_start: float
    error_projected: float | None  # None: gradient projection is off
    projected: bool
    error_end: float
    penalty: float | None  # None: not aligned


@torch.no_grad()
def project_layer(
    carve: LayerCarve,
    inputs: Sequence[Tensor],
    target: Target,
    gradients: Mapping[str, Tensor],
    settings: ProjectConfig,
    seed: int,
) -> tuple[ExpertLoop, Outcome]:
    """Base, gradient projection, alignment.

    Args:
        carve: the layer.
        inputs: FFN inputs of the already-carved model, a batch each.
        target: what the layer should give, see `align_down`.
        gradients: matrix name → the dense layer's mean gradient; empty without gradient projection.
        settings: of the stage.
        seed: of a random base.
    """
    loop = start(carve, inputs, settings.base, seed)
    _, guard = split_guard(len(inputs), settings.guard_share)
    before = relative_error(loop, inputs, target, guard)
    error_projected, projected = None, False
    if gradients:
        candidate = replace(loop, experts=step_along(loop, gradients, settings))
        error_projected = relative_error(candidate, inputs, target, guard)
        projected = not settings.guard or error_projected < before
        loop = candidate if projected else loop
    end, penalty = error_projected if projected and error_projected is not None else before, None
    if settings.alignment == "ridge":
        aligned = align_down(loop, inputs, target, settings)
        loop, end, penalty = aligned.carved, aligned.error_after, aligned.penalty
    return loop, Outcome(before, error_projected, projected, end, penalty)


def start(carve: LayerCarve, inputs: Sequence[Tensor], base: str, seed: int) -> ExpertLoop:
    """The layer before any step: dense slices or seeded noise, copies of a unit sharing its weight."""
    experts = slice_ffn(carve.ffn, carve.units_EN, carve.always_S)
    if base == "random":
        experts = draw_experts(experts, seed)
    copies = routed_copies(carve.units_EN, carve.always_S, carve.ffn.width, carve.shape.top_k, carve.rows_ED)
    if has_copies(carve.units_EN):
        scale_F = replica_scale(copies, carve.ffn, inputs)
        experts = replace(experts, down_EDN=experts.down_EDN * scale_F[carve.units_EN.long()][:, None])
    return ExpertLoop(
        experts,
        carve.units_EN,
        carve.always_S,
        carve.rows_ED,
        carve.shape.top_k,
        carve.ffn.width,
        carve.ffn.act,
    )


def step_along(loop: ExpertLoop, gradients: Mapping[str, Tensor], settings: ProjectConfig) -> LayerExperts:
    """The experts after one gradient projection."""
    strength = settings.sign * settings.beta * settings.alpha
    return project_experts(loop.experts, gradients, loop.units_EN, strength=strength, epsilon=settings.epsilon)
