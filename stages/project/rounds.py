"""Router and alignment in turn: each is fitted to what the other has become, as long as held-out tokens gain."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from models.expert_loop import ExpertLoop
from models.routing import LinearRouter
from stages.calibration.alignment import Target, align_down
from stages.calibration.gate_scale import at_usual_gates, column_scale, scale_columns
from stages.calibration.guard import split_guard
from stages.project.config import ProjectConfig
from stages.project.layer_carve import Guarded, LayerCarve
from stages.routing.fit import RouterSettings, refit_router
from stages.routing.measure import load_balance, set_spread
from stages.routing.methods import IMITATING_ROUTERS
from stages.routing.task import RouterTask, watch_contributions

GATE_SPREADS = (0.1, 0.3, 1.0)  # standard deviations of the logits that are tried for fitted gates


def alternate(
    carve: LayerCarve,
    base: ExpertLoop,
    state: Guarded,
    inputs: Sequence[Tensor],
    target: Target,
    settings: ProjectConfig,
) -> tuple[Guarded, int]:
    """Fit the router to the aligned experts, align the unaligned ones to the new routing, as long as it helps.

    Where the routers pay for uneven load, so does the round that is judged.
    """
    if carve.shape.top_k == carve.shape.experts:
        return state, 0
    imitates = settings.rounds > 0 and carve.refit.method in IMITATING_ROUTERS
    contributions = watch_contributions(carve.ffn, carve.units_EN, inputs) if imitates else []
    for kept in range(settings.rounds):
        usual = at_usual_gates(state.loop, inputs)
        router = refit_router(RouterTask(usual, target, carve.biased, inputs, contributions), carve.refit)
        if router is None or chooses_alike(router, state.loop, inputs):
            return state, kept
        rerouted = reroute(base, set_spread(router, inputs[: carve.text], carve.spread), inputs)
        aligned = align_down(rerouted, inputs, target, settings)
        before, after = (load_cost(loop, inputs, carve.refit) for loop in (state.loop, aligned.carved))
        if settings.guard and aligned.error_after + after >= state.error + before:
            return state, kept
        state = Guarded(aligned.carved, aligned.error_after)
    return state, settings.rounds


def reroute(base: ExpertLoop, router: LinearRouter, inputs: Sequence[Tensor]) -> ExpertLoop:
    """The layer behind another router, its down columns scaled to that one's gates and choices."""
    rerouted = replace(base, router=router)
    return scale_columns(rerouted, column_scale(rerouted, inputs) / column_scale(base, inputs))


def load_cost(loop: ExpertLoop, inputs: Sequence[Tensor], refit: RouterSettings) -> float:
    """What an uneven load counts for beside the error: the router's price times the variance on the guard tokens."""
    if not refit.descent.balance:
        return 0.0
    _, guard = split_guard(len(inputs), refit.guard_share)
    load_E = load_balance(loop.router, [inputs[index] for index in guard], loop.top_k)
    return refit.descent.balance * float((load_E - 1).square().mean())


def fit_gates(
    base: ExpertLoop, state: Guarded, inputs: Sequence[Tensor], target: Target, settings: ProjectConfig
) -> tuple[Guarded, float | None]:
    """Let the gates speak: align to logits of several spreads, and keep what the guard tokens like best.

    A selection bias is written for small logits alone and is left out.
    """
    best, kept = state, None
    for spread in GATE_SPREADS:
        router = set_spread(LinearRouter.without_bias(state.loop.router.rows_ED), inputs, spread)
        aligned = align_down(reroute(base, router, inputs), inputs, target, settings)
        if aligned.error_after < best.error:
            best, kept = Guarded(aligned.carved, aligned.error_after), spread
    return best, kept


def chooses_alike(router: LinearRouter, loop: ExpertLoop, inputs: Sequence[Tensor]) -> bool:
    """Whether the layer's own router sends every token to the same experts."""
    choices = (
        (router.choose(x_TD, loop.top_k).sort(1).values, loop.router.choose(x_TD, loop.top_k).sort(1).values)
        for x_TD in inputs
    )
    return all(torch.equal(new_TK, old_TK) for new_TK, old_TK in choices)
