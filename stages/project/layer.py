"""One layer's projection: each step is tried, judged on held-out tokens, and kept or dropped."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from models.expert_loop import ExpertLoop
from models.routing import LinearRouter
from stages.calibration.alignment import Target, align_down, relative_error
from stages.calibration.gate_scale import column_scale, scale_columns
from stages.calibration.guard import split_guard
from stages.project.config import ProjectConfig
from stages.project.descent import train_experts
from stages.project.gradient_projection import sample_experts
from stages.project.layer_carve import Guarded, LayerCarve
from stages.project.rounds import alternate, fit_gates
from stages.routing.task import make_loop


@dataclass(frozen=True)
class Outcome:
    """A layer after projection; errors are relative, on guard tokens, after the step named."""

    error_start: float
    error_aligned: float | None = None  # None: alignment is off
    penalty: float | None = None  # None: not aligned
    rounds: int = 0  # of router and alignment that were kept
    gate_spread: float | None = None  # None: gates stay as the router's mode made them
    error_end: float = 0.0


@torch.no_grad()
def project_layer(
    carve: LayerCarve,
    inputs: Sequence[Tensor],
    target: Target,
    settings: ProjectConfig,
    seed: int,
) -> tuple[ExpertLoop, Outcome]:
    """Base, alignment, rounds of router and alignment, descent.

    Args:
        carve: the layer.
        inputs: FFN inputs of the already-carved model, a batch each.
        target: what the layer should give, see `align_down`.
        settings: of the stage.
        seed: of a random base and of whatever is trained.
    """
    _, guard = split_guard(len(inputs), settings.guard_share)

    def judge(loop: ExpertLoop) -> Guarded:
        return Guarded(loop, relative_error(loop, inputs, target, guard))

    state = judge(start(carve, carve.router, inputs, settings.base, seed))
    outcome = Outcome(state.error)
    base = state.loop
    if settings.alignment == "ridge":
        aligned = align_down(base, inputs, target, settings)
        state = Guarded(aligned.carved, aligned.error_after)
        outcome = replace(outcome, error_aligned=state.error, penalty=aligned.penalty)
        # The penalty depends on tokens and units, hardly on the routing: it is searched once.
        again = replace(settings, penalties=[aligned.penalty]) if aligned.penalty is not None else settings
        state, rounds = alternate(carve, base, state, inputs, target, again)
        outcome = replace(outcome, rounds=rounds)
        if settings.gates == "fitted":
            state, spread = fit_gates(base, state, inputs, target, again)
            outcome = replace(outcome, gate_spread=spread)
    if settings.descent_steps:
        trained = judge(train_experts(state.loop, inputs, target, settings, seed))
        state = trained if not settings.guard or trained.error < state.error else state
    return state.loop, replace(outcome, error_end=state.error)


def start(carve: LayerCarve, router: LinearRouter, inputs: Sequence[Tensor], base: str, seed: int) -> ExpertLoop:
    """The layer before any step: dense slices or seeded noise, down columns scaled to what gates and copies weigh."""
    loop = make_loop(carve.ffn, carve.units_EN, carve.always_S, router, carve.shape.top_k)
    loop = replace(loop, gate=carve.gate)
    if base == "random":
        loop = replace(loop, experts=sample_experts(loop.experts, seed))
    return scale_columns(loop, column_scale(loop, inputs))
