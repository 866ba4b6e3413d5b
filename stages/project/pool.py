"""The projection of a global pool: each step is tried on all layers, judged on held-out tokens, and kept or dropped.

The layers share their experts, so that no layer can be finished before the next one is begun. Unlike `layer.py` this
looks at what the layers see in the dense model, not in the carved one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from models.expert_loop import ExpertLoop
from models.experts import LayerExperts
from models.routing import LinearRouter
from stages.calibration.gate_scale import at_usual_gates, scale_columns, scale_pool
from stages.calibration.guard import split_guard
from stages.calibration.layer_samples import LayerSample
from stages.contracts.pool_partition import PoolPartition
from stages.project.config import ProjectConfig
from stages.project.gradient_projection import sample_experts
from stages.project.pool_alignment import align_pool, layer_errors
from stages.routing.fit import RouterSettings, refit_pool_router
from stages.routing.measure import set_spread
from stages.routing.task import watch_pool


@dataclass(frozen=True)
class PoolCarve:
    """What the earlier stages decided."""

    partition: PoolPartition
    samples: Sequence[LayerSample]
    refit: Sequence[RouterSettings]  # of every layer
    spread: float  # of the routers' logits
    biased: bool  # routers may have a bias


@dataclass(frozen=True)
class PoolOutcome:
    """Relative errors of every layer on guard tokens, after the step named; and what became of the steps."""

    errors: dict[str, list[float]] = field(default_factory=dict)
    penalty: float | None = None  # None: not aligned
    rounds: int = 0  # of routers and alignment that were kept


def start_pool(parts: Sequence[LayerExperts], base: str, seeds: Sequence[int]) -> list[LayerExperts]:
    """What every layer gives to the pool: the dense slices, or seeded noise of their size."""
    if base == "extracted":
        return list(parts)
    return [sample_experts(part, seed) if len(part.gate_END) else part for part, seed in zip(parts, seeds, strict=True)]


@torch.no_grad()
def project_pool(
    carve: PoolCarve, loops: Sequence[ExpertLoop], settings: ProjectConfig
) -> tuple[Sequence[ExpertLoop], PoolOutcome]:
    """Alignment, and rounds of routers and alignment.

    Args:
        carve: the pool and what its layers see.
        loops: the layers over the pool as it starts.
        settings: of the stage.
    """
    _, guard = split_guard(len(carve.samples[0].inputs), settings.guard_share)
    outcome = PoolOutcome({"as cut": layer_errors(loops, carve.samples, guard)})
    loops, outcome = alignment_step(carve, loops, settings, outcome)
    outcome.errors["at the end"] = layer_errors(loops, carve.samples, guard)
    return loops, outcome


def alignment_step(
    carve: PoolCarve,
    loops: Sequence[ExpertLoop],
    settings: ProjectConfig,
    outcome: PoolOutcome,
) -> tuple[Sequence[ExpertLoop], PoolOutcome]:
    """Align; then fit the routers to what came of it and align the unaligned experts again, as long as it helps."""
    if settings.alignment == "none":
        return loops, outcome
    fitted, guard = split_guard(len(carve.samples[0].inputs), settings.guard_share)

    def align(start: Sequence[ExpertLoop]) -> tuple[Sequence[ExpertLoop], float, float | None]:
        return align_pool(
            start,
            carve.samples,
            fitted,
            guard,
            penalties=settings.penalties,
            sweeps=settings.pool_sweeps,
            guarded=settings.guard,
        )

    aligned, error, penalty = align(loops)
    errors = outcome.errors | {"after alignment": layer_errors(aligned, carve.samples, guard)}
    kept = 0
    while kept < settings.rounds and loops[0].top_k < len(loops[0].units_EN):
        routers = refit_routers(carve, aligned)
        if routers is None:
            break
        again, lower, other = align(reroute_pool(loops, routers, carve.samples))
        if settings.guard and lower >= error:
            break
        aligned, error, penalty, kept = again, lower, other, kept + 1
    return aligned, replace(outcome, errors=errors, penalty=penalty, rounds=kept)


def refit_routers(carve: PoolCarve, loops: Sequence[ExpertLoop]) -> list[LinearRouter] | None:
    """Routers of the same method for the experts as they are now; None for a method that fits nothing."""
    routers = []
    for loop, sample, settings in zip(loops, carve.samples, carve.refit, strict=True):
        usual = at_usual_gates(loop, sample.inputs)
        router = refit_pool_router(watch_pool(usual, sample.target, sample.inputs, biased=carve.biased), settings)
        if router is None:
            return None
        routers.append(set_spread(router, sample.inputs, carve.spread))
    return routers


def weigh_pool(loops: Sequence[ExpertLoop], samples: Sequence[LayerSample]) -> list[ExpertLoop]:
    """The pool with its down columns scaled to what its gates weigh, all layers together."""
    scale_E1 = scale_pool(loops, [sample.inputs for sample in samples])
    return [scale_columns(loop, scale_E1) for loop in loops]


def reroute_pool(
    loops: Sequence[ExpertLoop], routers: Sequence[LinearRouter], samples: Sequence[LayerSample]
) -> list[ExpertLoop]:
    """The pool behind other routers, its down columns scaled to their gates instead."""
    rerouted = [replace(loop, router=router) for loop, router in zip(loops, routers, strict=True)]
    inputs = [sample.inputs for sample in samples]
    scale_E1 = scale_pool(rerouted, inputs) / scale_pool(loops, inputs)
    return [scale_columns(loop, scale_E1) for loop in rerouted]


def split_pool(loops: Sequence[ExpertLoop], partition: PoolPartition) -> list[LayerExperts]:
    """What every layer gives to the pool, beside its own always-on units."""
    first, parts = 0, []
    for loop, given in zip(loops, partition.given, strict=True):
        here, experts = slice(first, first + given), loop.experts
        parts.append(
            replace(
                experts,
                gate_END=experts.gate_END[here],
                up_END=experts.up_END[here],
                down_EDN=experts.down_EDN[here],
            )
        )
        first += given
    return parts
