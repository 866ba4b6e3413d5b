"""One layer's projection: each step is tried, judged on held-out tokens, and kept or dropped."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from models.experts import ExpertLoop, LayerExperts
from models.ffn import DenseFFN
from models.routing import GateKind, LinearRouter
from models.shape import MoEShape
from stages.calibration.alignment import Target, align_down, relative_error, split_validation
from stages.calibration.gate_scale import at_usual_gates, column_scale, scale_columns
from stages.project.config import ProjectConfig
from stages.project.gradient_projection import sample_experts
from stages.routing.fit import RouterSettings, refit_router
from stages.routing.task import RouterTask, load_balance, make_loop, set_logit_std


@dataclass(frozen=True)
class LayerCarve:
    """What the earlier stages decided for one layer."""

    ffn: DenseFFN
    neurons_EN: Tensor
    always_S: Tensor
    router: LinearRouter
    shape: MoEShape
    refit: RouterSettings
    logit_std: float  # of the router's logits on the text
    biased: bool  # the router may have a bias
    gate: GateKind = GateKind.CONSTANT
    text: int | None = None  # batches of text, the first of the inputs; None: all


@dataclass(frozen=True)
class Candidate:
    """The layer after a step, and its error on the guard tokens."""

    loop: ExpertLoop
    error: float


GATE_SPREADS = (0.1, 0.3, 1.0)  # standard deviations of the logits that are tried for fitted gates


def alternate(
    carve: LayerCarve,
    base: ExpertLoop,
    state: Candidate,
    inputs: Sequence[Tensor],
    target: Target,
    settings: ProjectConfig,
) -> tuple[Candidate, int]:
    """Fit the router to the aligned experts, align the unaligned ones to the new routing, as long as it helps.

    Where the routers pay for uneven load, so does the round that is judged.
    """
    if carve.shape.top_k == carve.shape.experts:
        return state, 0
    for kept in range(settings.rounds):
        usual = at_usual_gates(state.loop, inputs)
        router = refit_router(RouterTask(usual, target, carve.biased, inputs), carve.refit)
        if router is None or chooses_alike(router, state.loop, inputs):
            return state, kept
        rerouted = reroute(base, set_logit_std(router, inputs[: carve.text], carve.logit_std), inputs)
        aligned = align_down(rerouted, inputs, target, settings)
        before, after = (load_cost(loop, inputs, carve.refit) for loop in (state.loop, aligned.carved))
        if settings.validate and aligned.error_after + after >= state.error + before:
            return state, kept
        state = Candidate(aligned.carved, aligned.error_after)
    return state, settings.rounds


def reroute(base: ExpertLoop, router: LinearRouter, inputs: Sequence[Tensor]) -> ExpertLoop:
    """The layer behind another router, its down columns scaled to that one's gates and choices."""
    rerouted = replace(base, router=router)
    return scale_columns(rerouted, column_scale(rerouted, inputs) / column_scale(base, inputs))


def load_cost(loop: ExpertLoop, inputs: Sequence[Tensor], refit: RouterSettings) -> float:
    """What an uneven load counts for beside the error: the router's price times the variance on the guard tokens."""
    if not refit.descent.balance:
        return 0.0
    _, validate = split_validation(len(inputs), refit.validation_share)
    load_E = load_balance(loop.router, [inputs[index] for index in validate], loop.top_k)
    return refit.descent.balance * float((load_E - 1).square().mean())


def fit_gates(
    base: ExpertLoop, state: Candidate, inputs: Sequence[Tensor], target: Target, settings: ProjectConfig
) -> tuple[Candidate, float | None]:
    """Let the gates speak: align to logits of several spreads, and keep what the guard tokens like best.

    A selection bias is written for small logits alone and is left out.
    """
    best, kept = state, None
    for logit_std in GATE_SPREADS:
        router = set_logit_std(LinearRouter.without_bias(state.loop.router.rows_ED), inputs, logit_std)
        aligned = align_down(reroute(base, router, inputs), inputs, target, settings)
        if aligned.error_after < best.error:
            best, kept = Candidate(aligned.carved, aligned.error_after), logit_std
    return best, kept


def chooses_alike(router: LinearRouter, loop: ExpertLoop, inputs: Sequence[Tensor]) -> bool:
    """Whether the layer's own router sends every token to the same experts."""
    choices = (
        (router.choose(x_TD, loop.top_k).sort(1).values, loop.router.choose(x_TD, loop.top_k).sort(1).values)
        for x_TD in inputs
    )
    return all(torch.equal(new_TK, old_TK) for new_TK, old_TK in choices)


def train_experts(
    loop: ExpertLoop, inputs: Sequence[Tensor], target: Target, settings: ProjectConfig, seed: int
) -> ExpertLoop:
    """Adam on the squared error of the layer's output, with the routing as it is; guard tokens are not seen.

    Copies of a neuron become neurons of their own: each goes where its expert needs it.

    Args:
        loop: the layer as it is.
        inputs: its FFN inputs, a batch each.
        target: see `align_down`.
        settings: `descent_*` and `validation_share`.
        seed: of the order of the tokens.
    """
    fitted, _ = split_validation(len(inputs), settings.validation_share)
    x_TD = torch.cat([inputs[index] for index in fitted])
    wanted_TD = torch.cat([target(index, inputs[index]) for index in fitted])
    scale = wanted_TD.square().mean().clamp_min(1e-30)
    weights = {spec.name: getattr(loop.experts, spec.name).clone() for spec in fields(LayerExperts)}
    trained = [weight.requires_grad_() for weight in weights.values() if weight.numel()]
    groups = [
        {"params": [weight], "lr": settings.descent_rate * float(weight.detach().square().mean().sqrt())}
        for weight in trained
    ]
    # Fused: one pass over all weights, in a quarter of the plain one's time.
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.98), fused=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=settings.descent_steps)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(settings.descent_steps):
        tokens_t = torch.randint(len(x_TD), (min(settings.descent_tokens, len(x_TD)),), generator=generator)
        tokens_t = tokens_t.to(x_TD.device)
        with torch.enable_grad():
            output_tD = replace(loop, experts=LayerExperts(**weights)).differentiable(x_TD[tokens_t])
            loss = (output_tD - wanted_TD[tokens_t]).square().mean() / scale
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    return replace(loop, experts=LayerExperts(**{name: weight.detach() for name, weight in weights.items()}))


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
    _, validate = split_validation(len(inputs), settings.validation_share)

    def evaluate_candidate(loop: ExpertLoop) -> Candidate:
        return Candidate(loop, relative_error(loop, inputs, target, validate))

    state = evaluate_candidate(start(carve, carve.router, inputs, settings.base, seed))
    outcome = Outcome(state.error)
    base = state.loop
    if settings.alignment == "ridge":
        aligned = align_down(base, inputs, target, settings)
        state = Candidate(aligned.carved, aligned.error_after)
        outcome = replace(outcome, error_aligned=state.error, penalty=aligned.penalty)
        # The penalty depends on tokens and neurons, hardly on the routing: it is searched once.
        again = replace(settings, penalties=[aligned.penalty]) if aligned.penalty is not None else settings
        state, rounds = alternate(carve, base, state, inputs, target, again)
        outcome = replace(outcome, rounds=rounds)
        if settings.gates == "fitted":
            state, logit_std = fit_gates(base, state, inputs, target, again)
            outcome = replace(outcome, gate_spread=logit_std)
    if settings.descent_steps:
        trained = evaluate_candidate(train_experts(state.loop, inputs, target, settings, seed))
        state = trained if not settings.validate or trained.error < state.error else state
    return state.loop, replace(outcome, error_end=state.error)


def start(carve: LayerCarve, router: LinearRouter, inputs: Sequence[Tensor], base: str, seed: int) -> ExpertLoop:
    """The layer before any step: dense slices or seeded noise, down columns scaled to what gates and copies weigh."""
    loop = make_loop(carve.ffn, carve.neurons_EN, carve.always_S, router, carve.shape.top_k)
    loop = replace(loop, gate=carve.gate)
    if base == "random":
        loop = replace(loop, experts=sample_experts(loop.experts, seed))
    return scale_columns(loop, column_scale(loop, inputs))
