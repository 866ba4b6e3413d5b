"""The projection of a global pool: each step is fitted on all layers, and kept if the validation error falls.

The layers share their experts, so they cannot be finished one after the other. Unlike in `layer_pass.py`, their inputs
are those of the dense model, not of the carved one.

With routing fixed, Σ_l E‖FFN_l(x_l) − MoE_l(x_l)‖² / E‖FFN_l(x_l)‖² is a least-squares problem in the down projections.
For all E·N columns at once, the system would be E·N wide. For one expert, fitted to the residual of the others, it is N
wide.

Several workers have samples of different layers. Each fits the routers of its layers; moments and errors are summed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from models.experts import ExpertLoop
from models.routing import LinearRouter, relative_gates
from stages.artifacts.job import ALONE, Workers
from stages.calibration.alignment import (
    Alignment,
    at_usual_gates,
    gate_moments,
    least_squares,
    relative_error,
    scale_columns,
    search_penalty,
)
from stages.calibration.batches import LayerSample
from stages.calibration.normal_equations import NormalEquations
from stages.calibration.share import split_validation
from stages.project.config import ProjectConfig
from stages.project.layer_pass import alternate
from stages.routing.descent import RouterSettings
from stages.routing.fit import fit_pool_router
from stages.routing.task import set_logit_std, watch_pool

SWEEPS = 2  # of an alignment over all experts, one expert at a time

Loops = Sequence[ExpertLoop]  # the layers over their shared experts


@dataclass(frozen=True)
class RoutedTokens:
    """One layer's tokens, their experts, and the residual of their outputs before anything is fitted."""

    x_TD: Tensor
    places: list[tuple[Tensor, Tensor]]  # of every expert: its tokens, and their gates (t, 1)
    missing_TD: Tensor
    scale: float  # 1 / the root-mean-square norm of the target outputs

    @classmethod
    def of(cls, loop: ExpertLoop, sample: LayerSample, batches: Sequence[int]) -> "RoutedTokens":
        """The layer on these batches."""
        x_TD, wanted_TD = (torch.cat([part[batch] for batch in batches]) for part in (sample.inputs, sample.outputs))
        chosen_TK = loop.router.choose(x_TD, loop.top_k)
        gates_TK = relative_gates(loop.gate, x_TD @ loop.router.rows_ED.T, chosen_TK)
        found = ((chosen_TK == expert).nonzero().unbind(1) for expert in range(loop.router.experts))
        places = [(tokens_t, gates_TK[tokens_t, slots_t, None]) for tokens_t, slots_t in found]
        norm = float(wanted_TD.square().sum(1).mean().sqrt())
        return cls(x_TD, places, wanted_TD - loop(x_TD), 1 / norm if norm else 0.0)

    def served(self, loop: ExpertLoop, expert: int) -> tuple[Tensor, Tensor]:
        """Tokens routed to the expert, and its activations for them, times its gates."""
        tokens_t, gates_t1 = self.places[expert]
        hidden_tN = loop.hidden(self.x_TD[tokens_t], loop.experts.gate_END[expert], loop.experts.up_END[expert])
        return tokens_t, hidden_tN * gates_t1


def sweep_experts(
    loop: ExpertLoop, layers: Sequence[RoutedTokens], penalty: float, sweeps: int, workers: Workers = ALONE
) -> Float[Tensor, "E D N"]:
    """Block coordinate descent: fit one expert of the pool after the other to the residual of the others.

    `loop` is any layer's, since all share the experts; `layers` are those of this worker. The ridge of each step
    penalises the change of the columns. An expert without tokens is unchanged.

    Returns:
        The down projections of the pool.
    """
    down_EDN = loop.experts.down_EDN.clone()
    missing_LTD = [layer.missing_TD.clone() for layer in layers]
    for expert in list(range(len(down_EDN))) * sweeps:
        served = [layer.served(loop, expert) for layer in layers]
        moments = NormalEquations(down_EDN.shape[2], down_EDN.shape[1], device=down_EDN.device)
        for layer, missing_TD, (tokens_t, hidden_tN) in zip(layers, missing_LTD, served, strict=True):
            moments.add(hidden_tN * layer.scale, missing_TD[tokens_t] * layer.scale)
        moments.reduce(workers)
        change_DN = moments.solve_for(workers, penalty)
        down_EDN[expert] += change_DN
        for missing_TD, (tokens_t, hidden_tN) in zip(missing_LTD, served, strict=True):
            missing_TD[tokens_t] -= hidden_tN @ change_DN.T
    return down_EDN


@dataclass(frozen=True)
class PoolOutcome:
    """Relative errors of every layer on validation tokens after each step, and the steps kept."""

    errors: dict[str, list[float]]
    penalty: float | None  # None: not aligned
    rounds: int  # of routers and alignment, kept


@dataclass(frozen=True)
class PoolFit:
    """The samples to which a pool is fitted, and how."""

    samples: Sequence[LayerSample | None]  # of every layer; None: another worker has it
    refits: Sequence[RouterSettings]  # of every layer's router
    settings: ProjectConfig
    workers: Workers = ALONE

    @property
    def mine(self) -> Iterator[tuple[int, LayerSample]]:
        """The layers of this worker."""
        return ((layer, sample) for layer, sample in enumerate(self.samples) if sample)

    def split(self) -> tuple[list[int], list[int]]:
        """Batches to fit on, and validation batches, the same in all layers; none for a worker without samples."""
        _, sample = next(self.mine, (0, LayerSample([], [])))
        return split_validation(len(sample.inputs), self.settings.validation_share, sample.sources)

    @torch.no_grad()
    def project(self, loops: Loops) -> tuple[Loops, PoolOutcome]:
        """Alignment, then rounds of routers and alignment; `loops` are the layers over the initial pool."""
        _, validation = self.split()
        errors = {"as cut": self.layer_errors(loops, validation)}
        aligned, kept = Alignment(loops, 0.0), 0
        if self.settings.alignment == "ridge":
            aligned = self.align(loops)
            errors["after alignment"] = self.layer_errors(aligned.carved, validation)
            if loops[0].top_k < len(loops[0].neurons_EN) and self.refits[0].method != "random":
                again = lambda found: self.align(self.reroute(loops, self.refit_routers(found)))  # noqa: E731
                aligned, kept = alternate(aligned, again, self.settings)
        errors["at the end"] = self.layer_errors(aligned.carved, validation)
        return aligned.carved, PoolOutcome(errors, aligned.penalty, kept)

    def align(self, loops: Loops) -> Alignment[Loops]:
        """Fit the shared down projections to all layers' outputs."""
        fitted, validation = self.split()
        routed = [RoutedTokens.of(loops[layer], sample, fitted) for layer, sample in self.mine]

        def fit(penalty: float) -> Loops:
            return with_down(loops, sweep_experts(loops[0], routed, penalty, SWEEPS, self.workers))

        return search_penalty(loops, fit, lambda candidate: self.mean_error(candidate, validation), self.settings)

    def layer_errors(self, loops: Loops, batches: Sequence[int]) -> list[float]:
        """Σ‖FFN − MoE‖² / Σ‖FFN‖² of every layer, on the dense model's inputs."""
        errors_L = torch.zeros(len(loops), dtype=torch.float64)
        for layer, sample in self.mine:
            errors_L[layer] = relative_error(loops[layer], sample.inputs, sample.outputs, batches)
        self.workers.sum_(errors_L)
        errors: list[float] = errors_L.tolist()
        return errors

    def mean_error(self, loops: Loops, batches: Sequence[int]) -> float:
        """The mean of `layer_errors`, which are relative, so that late layers with large outputs do not dominate."""
        return sum(self.layer_errors(loops, batches)) / len(loops)

    def refit_routers(self, loops: Loops) -> list[LinearRouter]:
        """Routers of the same method, fitted to the current experts."""
        found: dict[int, LinearRouter] = {}
        for layer, sample in self.mine:
            task = watch_pool(at_usual_gates(loops[layer], sample.inputs), sample.outputs, sample.inputs)
            router = fit_pool_router(task, self.refits[layer], others=[loops[layer].router])
            found[layer] = set_logit_std(router, sample.inputs, self.refits[layer].logit_std).to("cpu")
        for others in self.workers.gather(found):
            found |= others
        return [found[layer].to(loop.router.rows_ED.device) for layer, loop in enumerate(loops)]

    def gate_scale(self, loops: Loops) -> Float[Tensor, "E 1"]:
        """`column_scale` for a pool: one constant per expert, over all layers' tokens. Its neurons have no copies."""
        rows_ED = loops[0].router.rows_ED
        moments_L2E = rows_ED.new_zeros(len(loops), 2, len(rows_ED), dtype=torch.float64)
        for layer, sample in self.mine:
            moments_L2E[layer] = gate_moments(loops[layer], sample.inputs)
        self.workers.sum_(moments_L2E)
        return least_squares(moments_L2E.sum(0))[:, None]

    def weigh(self, loops: Loops) -> Loops:
        """The pool with its down columns scaled for the gates of all layers together."""
        return scale_shared(loops, self.gate_scale(loops))

    def reroute(self, loops: Loops, routers: Sequence[LinearRouter]) -> Loops:
        """The pool behind other routers, with down columns scaled for the new gates."""
        rerouted = [replace(loop, router=router) for loop, router in zip(loops, routers, strict=True)]
        return scale_shared(rerouted, self.gate_scale(rerouted) / self.gate_scale(loops))


def scale_shared(loops: Loops, scale_E1: Float[Tensor, "E 1"]) -> Loops:
    """The layers with scaled down columns, which stay one tensor: gradient projection moves each tensor on its own."""
    return with_down(loops, scale_columns(loops[0], scale_E1).experts.down_EDN)


def with_down(loops: Loops, down_EDN: Float[Tensor, "E D N"]) -> Loops:
    """The layers over a pool with other down projections."""
    return [replace(loop, experts=replace(loop.experts, down_EDN=down_EDN)) for loop in loops]
