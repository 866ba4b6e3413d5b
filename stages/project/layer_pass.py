"""Project layer by layer: each is fitted on the outputs of the carved layers before it, each step validated."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from instruments.device import is_launch_bound, rounded_products
from models.device import fetch_ahead
from models.experts import ExpertLoop, ExpertWeights
from models.routing import LinearRouter, rounded
from models.stream import LayerStream
from models.targets.base import is_power_of_two
from stages.artifacts.carve import Partition, Routers
from stages.artifacts.experts import CheckpointFormat, load_layer
from stages.artifacts.job import Job
from stages.artifacts.tensor_file import load_layer_checkpoint, save_layer_checkpoint
from stages.calibration.alignment import (
    Alignment,
    Fitted,
    align_down,
    at_usual_gates,
    column_scale,
    relative_error,
    scale_columns,
)
from stages.calibration.batches import CalibrationContext, TokenStream, layer_seed, text_sources
from stages.calibration.share import Share, take_rows, take_tokens
from stages.project.config import ProjectConfig
from stages.routing.descent import RouterSettings
from stages.routing.fit import fit_router
from stages.routing.task import RouterTask, load_balance, set_logit_std

# Of descent, at the first step, relative to the size of each matrix's weights; a third and three times of it lose more.
DESCENT_RATE = 0.01


@dataclass(frozen=True)
class Outcome:
    """Relative errors of a projected layer on validation tokens after each step, and the steps kept."""

    error_start: float
    error_aligned: float | None = None  # on the tokens of the rounds; None: alignment is off
    penalty: float | None = None  # None: not aligned
    rounds: int = 0  # of router and alignment, kept
    descended: bool = False  # descent was kept
    error_end: float = 0.0  # after descent


@torch.no_grad()
def project_layer(
    loop: ExpertLoop,
    refit: RouterSettings,
    inputs: Sequence[Tensor],
    wanted: Sequence[Tensor],
    settings: ProjectConfig,
    seed: int,
) -> tuple[ExpertLoop, Outcome]:
    """Alignment, rounds of router and alignment, descent of a layer as stage=assemble left it, unscaled.

    `inputs` (of the already carved model) and `wanted` are those of `align_down`; `seed` orders the tokens of descent.
    """
    share = Share.of(inputs)
    _, validation = share.split(settings.validation_share)
    base = scale_columns(loop, column_scale(loop, inputs))
    state = Alignment(base, relative_error(base, inputs, wanted, validation))
    outcome = Outcome(state.error)
    if settings.alignment == "ridge":
        state, first, rounds = align_layer(base, refit, inputs, wanted, settings)
        outcome = replace(outcome, error_aligned=first, penalty=state.penalty, rounds=rounds)
    if settings.descent_steps:
        # Descent fits the training tokens further, so it starts from columns that are fitted less closely to them.
        descended = train_experts(state.less_fitted or state.carved, inputs, wanted, settings, seed)
        trained = Alignment(descended, relative_error(descended, inputs, wanted, validation), state.penalty)
        if not settings.validate or trained.error < state.error:
            state, outcome = trained, replace(outcome, descended=True)
    return state.carved, replace(outcome, error_end=state.error)


def align_layer(
    base: ExpertLoop, refit: RouterSettings, inputs: Sequence[Tensor], wanted: Sequence[Tensor], settings: ProjectConfig
) -> tuple[Alignment[ExpertLoop], float, int]:
    """Alternate alignment and router refits on `refit_tokens` tokens, then align on all tokens.

    Returns:
        The layer, its error after the first alignment, and the number of rounds kept.
    """
    seen, targets = inputs, wanted
    refits = base.top_k < base.router.experts and refit.method != "random"
    if settings.rounds and refits:
        seen, targets = take_tokens(inputs, wanted, settings.refit_tokens)
    state = align_down(base, seen, targets, settings)
    first = state.error
    # The penalty depends on tokens and neurons, hardly on the routing, so it is searched once. Descent needs the next
    # larger one; more tokens need no larger one.
    sizes = sorted(settings.penalties)
    place = len(sizes) if state.penalty is None else sizes.index(state.penalty)
    again = replace(settings, penalties=sizes[place : place + 2] or sizes)

    def refitted(aligned: ExpertLoop) -> Alignment[ExpertLoop] | None:
        router = refit_router(aligned, refit, seen, targets)
        if chooses_alike(router, aligned, seen):
            return None
        router = set_logit_std(router, Share.of(seen).only_text(), refit.logit_std)
        return align_down(reroute(base, router, seen), seen, targets, again)

    rounds = 0
    if refits:
        state, rounds = alternate(state, refitted, again, lambda aligned: load_cost(aligned, seen, refit))
    if Share.of(seen).tokens < Share.of(inputs).tokens:
        last = replace(settings, penalties=sizes[: place + 2])
        state = align_down(reroute(base, state.carved.router, inputs), inputs, wanted, last)
    return state, first, rounds


def alternate(
    state: Alignment[Fitted],
    refit: Callable[[Fitted], Alignment[Fitted] | None],
    settings: ProjectConfig,
    load_cost: Callable[[Fitted], float] = lambda _: 0.0,
) -> tuple[Alignment[Fitted], int]:
    """Repeat while it helps: `refit` fits routers to the aligned experts, then aligns the original experts to them.

    It returns None if no token is routed to other experts. The rounds are compared by error plus `load_cost`; also
    returns the number of rounds kept.
    """
    for kept in range(settings.rounds):
        again = refit(state.carved)
        if again is None:
            return state, kept
        before, after = (one.error + load_cost(one.carved) for one in (state, again))
        if settings.validate and after >= before:
            return state, kept
        state = again
    return state, settings.rounds


def refit_router(
    aligned: ExpertLoop, refit: RouterSettings, inputs: Sequence[Tensor], wanted: Sequence[Tensor]
) -> LinearRouter:
    """A router for the aligned experts; one worker fits it for all, because descent takes hundreds of small steps."""
    usual, share = at_usual_gates(aligned, inputs), Share.of(inputs)
    tokens, targets = share.gather(), share.holding(wanted).gather()
    task = RouterTask(usual, targets, tokens)
    return share.workers.lead(lambda: fit_router(task, refit).to("cpu")).to(share.like.device)


def reroute(base: ExpertLoop, router: LinearRouter, inputs: Sequence[Tensor]) -> ExpertLoop:
    """The layer behind another router, with down columns scaled for the new gates and choices."""
    rerouted = replace(base, router=router)
    return scale_columns(rerouted, column_scale(rerouted, inputs) / column_scale(base, inputs))


def load_cost(loop: ExpertLoop, inputs: Sequence[Tensor], refit: RouterSettings) -> float:
    """The cost of uneven load, in units of error: `balance` times the load variance on validation tokens."""
    if not refit.balance:
        return 0.0
    share = Share.of(inputs)
    _, validation = share.split(refit.validation_share)
    load_E = load_balance(loop.router, inputs, loop.top_k, validation)
    return refit.balance * float((load_E - 1).square().mean())


def chooses_alike(router: LinearRouter, loop: ExpertLoop, inputs: Sequence[Tensor]) -> bool:
    """Whether the layer's own router sends every token to the same experts."""

    def count_moved(place: int) -> Tensor:
        new_TK, old_TK = (each.choose(inputs[place], loop.top_k).sort(1).values for each in (router, loop.router))
        return (new_TK != old_TK).sum()

    return not Share.of(inputs).total((), count_moved)


def train_experts(
    loop: ExpertLoop, inputs: Sequence[Tensor], wanted: Sequence[Tensor], settings: ProjectConfig, seed: int
) -> ExpertLoop:
    """Train the experts with Adam on the squared error of the layer's output; the routing is fixed.

    Validation tokens are left out. Copies of a neuron become independent neurons. `seed` orders the tokens. One worker
    trains for all, because the steps are many and small.
    """
    share = Share.of(inputs)
    fitted, _ = share.split(settings.validation_share)
    gathered = [share.gather(), share.holding(wanted).gather()]

    trained: dict[str, Tensor] = {}
    if share.workers.leads:
        x, wanted_outputs = ([part[index] for index in fitted] for part in gathered)
        trained = vars(descend_experts(loop, x, wanted_outputs, settings, seed))
    weights: dict[str, Tensor] = {}
    for name, weight in vars(loop.experts).items():
        weights[name] = trained[name].contiguous() if trained else weight.new_empty(weight.shape)
        share.workers.copy_(weights[name])
    return replace(loop, experts=ExpertWeights(**weights).to(share.like.device, torch.float32))


def descend_experts(
    loop: ExpertLoop, inputs: Sequence[Tensor], wanted: Sequence[Tensor], settings: ProjectConfig, seed: int
) -> ExpertWeights:
    """The steps of `train_experts`."""
    tokens, size = (sum(map(count, wanted)) for count in (len, Tensor.numel))
    squares = torch.stack([wanted_TD.square().sum(dtype=torch.float64) for wanted_TD in wanted]).sum()
    scale = (squares / size).float().clamp_min(1e-30)
    weights = {name: weight.clone() for name, weight in vars(loop.experts).items()}
    trained = [weight.requires_grad_() for weight in weights.values() if weight.numel()]
    sizes = torch.stack([weight.detach().square().mean().sqrt() for weight in trained]).tolist()
    groups = [{"params": [weight], "lr": DESCENT_RATE * size} for weight, size in zip(trained, sizes, strict=True)]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.98), fused=True)  # not fused, it takes four times as long
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=settings.descent_steps)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(tokens, (settings.descent_steps, min(settings.descent_tokens, tokens)), generator=generator)
    forward = _gathered_step(loop, inputs, wanted) if loop.masked else _step(loop, inputs, wanted)
    for tokens_t in (drawn.to(inputs[0].device) if loop.masked else drawn).unbind():
        with torch.enable_grad(), rounded_products():
            output_tD, wanted_tD = forward(ExpertWeights(**weights), tokens_t)
            loss = (output_tD - wanted_tD).square().mean() / scale
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    return ExpertWeights(**{name: weight.detach() for name, weight in weights.items()})


Step = Callable[[ExpertWeights, Tensor], tuple[Tensor, Tensor]]  # weights, tokens → output, wanted output


def _step(loop: ExpertLoop, inputs: Sequence[Tensor], wanted: Sequence[Tensor]) -> Step:
    return lambda experts, tokens_t: (
        replace(loop, experts=experts).differentiable(take_rows(inputs, tokens_t)),
        take_rows(wanted, tokens_t),
    )


def _gathered_step(loop: ExpertLoop, inputs: Sequence[Tensor], wanted: Sequence[Tensor]) -> Step:
    """As `_step`, with the gates of all tokens, which are fixed, computed once.

    A GPU copies the batches into one; those of a CPU may be on the disk, because they do not fit into its memory.
    """
    parts = inputs, [loop.gates(x_TD) for x_TD in inputs], wanted
    wholes = [torch.cat([*part]) for part in parts] if is_launch_bound(inputs[0].device) else []

    def step(experts: ExpertWeights, tokens_t: Tensor) -> tuple[Tensor, Tensor]:
        taken = [whole[tokens_t] for whole in wholes] or [take_rows(part, tokens_t) for part in parts]
        x_tD, gates_tE, wanted_tD = taken
        return replace(loop, experts=experts).masked_output(x_tD, gates_tE), wanted_tD

    return step


@dataclass(frozen=True)
class ProjectedLayer:
    """A layer on the CPU in the checkpoint's number format; down columns may be fp32 quotients, see `of`."""

    experts: ExpertWeights
    router: LinearRouter
    outcome: Outcome

    @classmethod
    def of(cls, loop: ExpertLoop, outcome: Outcome, dtype: torch.dtype, down_scale: float = 1.0) -> "ProjectedLayer":
        """Round a layer to the number format of its checkpoint, which stores the experts' down × `down_scale`."""
        experts = loop.experts.to("cpu", dtype)
        if dtype != torch.float32 and not is_power_of_two(down_scale):
            # The product is rounded once; its quotient is kept in fp32, because the format cannot represent it.
            product_EDN = (loop.experts.down_EDN.to("cpu", torch.float32) * down_scale).to(dtype)
            experts = replace(experts, down_EDN=product_EDN.float() / down_scale)
        return cls(experts, rounded(loop.router.to("cpu"), dtype), outcome)


@torch.no_grad()
def project_all(
    job: Job,
    stream: LayerStream,
    context: CalibrationContext,
    checkpoint: CheckpointFormat,
    partition: Partition,
    routers: Routers,
    project: ProjectConfig,
) -> dict[int, tuple[LinearRouter, Outcome]]:
    """Project the layers in order, each on the inputs from the carved layers before it; save each in `scratch`.

    Layers that stay dense have no result. Workers share the tokens and see the same `scratch`.
    """
    workers, scratch, found = job.workers, job.scratch, {}
    tokens = TokenStream(stream, context.batches, workers, context.memory)
    carved_layers = [index for index in range(stream.depth) if index not in checkpoint.shape.dense_layers]
    cut = fetch_ahead(partial(load_layer, job.parents["extract"]), carved_layers, stream.device)
    disk = ThreadPoolExecutor(1)
    saving = disk.submit(lambda: None)
    for index, layer in enumerate(tqdm(stream.layers(), total=stream.depth, desc="project", unit="layer")):
        tokens.enter(layer)
        carved: Callable[[Tensor], Tensor] = layer.ffn
        if index not in checkpoint.shape.dense_layers:
            make_loop = partial(checkpoint.loop, partition, index, act=layer.ffn.act, device=stream.device)
            done = load_layer_checkpoint(scratch, index, ProjectedLayer) if workers.leads else None
            _, experts = next(cut)
            # The leading worker, which removes damaged layers, decides whether an earlier run finished this one.
            if workers.broadcast(done is not None):
                done = done or find_done(scratch, index)
            else:
                seed = layer_seed(context.seed, index)
                refit = refit_settings(checkpoint, project, routers.logit_std, seed, text_sources(context.batches))
                with rounded_products(on=["cpu"]):
                    wanted = tokens.inputs.map(layer.ffn)
                del layer.ffn, carved  # the fit needs this memory
                loop = make_loop(experts, routers.layer(index))
                loop, outcome = project_layer(loop, refit, tokens.inputs, wanted, project, seed)
                del wanted  # free it before the next layer's is computed
                done = ProjectedLayer.of(loop, outcome, checkpoint.dtype, checkpoint.down_scale)
                if workers.leads:  # the disk works while the next layer is fitted
                    saving.result()
                    saving = disk.submit(save_layer_checkpoint, scratch, index, done)
            del experts
            # Later layers get the outputs of the rounded layer, as the checkpoint computes them.
            carved = make_loop(done.experts, done.router)
            found[index] = (done.router, done.outcome)
        if index < stream.depth - 1:  # nothing reads the last layer's outputs
            tokens.leave(map(carved, tokens.inputs))
    saving.result()
    return found


def find_done(scratch: Path, layer: int) -> ProjectedLayer:
    """Load a finished layer."""
    done = load_layer_checkpoint(scratch, layer, ProjectedLayer)
    assert done is not None, "every layer is kept"
    return done


def refit_settings(
    checkpoint: CheckpointFormat, project: ProjectConfig, logit_std: float, seed: int, sources: Sequence[str]
) -> RouterSettings:
    """Settings of a router refit: the method of stage=assemble, with this stage's steps and tokens.

    `sources` names the source of each batch of text.
    """
    form = checkpoint.settings
    return RouterSettings(
        form.router, form.ridge_penalty, form.router_tokens, project.router_steps, checkpoint.balance_weight, seed,
        validation_share=project.validation_share, logit_std=logit_std, sources=sources,
    )  # fmt: skip
