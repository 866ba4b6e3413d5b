"""Behaviour alignment of a pool: one down projection per expert for all the layers that use it.

With routing fixed, Σ_l E‖FFN_l(x_l) − MoE_l(x_l)‖² / E‖FFN_l(x_l)‖² is a least-squares problem in the down projections.
Of E·N columns at once its system would be E·N wide; one expert at a time, on what the others leave to be given, it is N
wide.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from models.experts import ExpertLoop
from models.routing import relative_gates
from stages.calibration.alignment import NormalEquations, relative_error
from stages.calibration.batches import LayerSample


class PoolAlignment(NamedTuple):
    """What came of it: the mean over layers of the relative error on validation batches, and its penalty."""

    loops: Sequence[ExpertLoop]
    error: float
    penalty: float | None  # None: nothing made it better, the columns stayed


def align_pool(
    loops: Sequence[ExpertLoop],
    samples: Sequence[LayerSample],
    fitted: Sequence[int],
    validation: Sequence[int],
    *,
    penalties: Sequence[float],
    sweeps: int,
    validate: bool,
) -> PoolAlignment:
    """Fit the shared down projections; keep the penalty of the lowest validation error, or none.

    Args:
        loops: the layers of the pool, which share their routed experts.
        samples: what each layer sees, and what it is to give.
        fitted: batches to fit on.
        validation: batches to judge by.
        penalties: of the ridge, relative to the mean diagonal of an expert's own second moment.
        sweeps: times that all experts are gone over.
        validate: the columns stay where no penalty lowers the validation error.
    """
    best = PoolAlignment(loops, mean_error(loops, samples, validation) if validate else float("inf"), None)
    last = float("inf")
    for penalty in sorted(penalties, reverse=True):
        candidate = with_down(loops, sweep_experts(loops, samples, fitted, penalty, sweeps))
        error = mean_error(candidate, samples, validation)
        if error < best.error:
            best = PoolAlignment(candidate, error, penalty)
        if error > last:
            break  # less penalty fits the tokens at hand ever closer, and the validation tokens ever worse
        last = error
    return best


@dataclass(frozen=True)
class _Routed:
    """One layer's tokens, the experts they are sent to, and what is still missing of their outputs."""

    x_TD: Tensor
    chosen_TK: Tensor
    gates_TK: Tensor
    missing_TD: Tensor  # changes with every expert that is fitted
    scale: float  # 1 / the root-mean-square norm of what the layer is to give

    @classmethod
    def of(cls, loop: ExpertLoop, sample: LayerSample, batches: Sequence[int]) -> "_Routed":
        """The layer before anything is fitted."""
        x_TD, wanted_TD = (torch.cat([part[batch] for batch in batches]) for part in (sample.inputs, sample.outputs))
        chosen_TK = loop.router.choose(x_TD, loop.top_k)
        gates_TK = relative_gates(loop.gate, x_TD @ loop.router.rows_ED.T, chosen_TK)
        norm = float(wanted_TD.square().sum(1).mean().sqrt())
        return cls(x_TD, chosen_TK, gates_TK, wanted_TD - loop(x_TD), 1 / norm if norm else 0.0)

    def served(self, loop: ExpertLoop, expert: int) -> tuple[Tensor, Tensor]:
        """Tokens that go to the expert, and its activations for them, as its gate weighs them."""
        tokens_t, slots_t = (self.chosen_TK == expert).nonzero().unbind(1)
        hidden_tN = loop.hidden(self.x_TD[tokens_t], loop.experts.gate_END[expert], loop.experts.up_END[expert])
        return tokens_t, hidden_tN * self.gates_TK[tokens_t, slots_t, None]


def sweep_experts(
    loops: Sequence[ExpertLoop], samples: Sequence[LayerSample], fitted: Sequence[int], penalty: float, sweeps: int
) -> Float[Tensor, "E D N"]:
    """Block coordinate descent: expert after expert is fitted to what the others leave to be given.

    Each step's ridge pulls to the columns as that step finds them. An expert that no token is sent to stays.

    Returns:
        The down projections of the pool.
    """
    down_EDN = loops[0].experts.down_EDN.clone()
    layers = [_Routed.of(loop, sample, fitted) for loop, sample in zip(loops, samples, strict=True)]
    for expert in list(range(len(down_EDN))) * sweeps:
        served = [layer.served(loops[0], expert) for layer in layers]
        moments = NormalEquations(down_EDN.shape[2], down_EDN.shape[1], device=down_EDN.device)
        for layer, (tokens_t, hidden_tN) in zip(layers, served, strict=True):
            moments.add(hidden_tN * layer.scale, layer.missing_TD[tokens_t] * layer.scale)
        change_DN = moments.solve(penalty)
        down_EDN[expert] += change_DN
        for layer, (tokens_t, hidden_tN) in zip(layers, served, strict=True):
            layer.missing_TD[tokens_t] -= hidden_tN @ change_DN.T
    return down_EDN


def with_down(loops: Sequence[ExpertLoop], down_EDN: Float[Tensor, "E D N"]) -> list[ExpertLoop]:
    """The layers with other shared down projections."""
    return [replace(loop, experts=replace(loop.experts, down_EDN=down_EDN)) for loop in loops]


def layer_errors(loops: Sequence[ExpertLoop], samples: Sequence[LayerSample], batches: Sequence[int]) -> list[float]:
    """Σ‖FFN − MoE‖² / Σ‖FFN‖² of every layer, on the dense model's own inputs."""
    return [
        relative_error(loop, sample.inputs, sample.target, batches) for loop, sample in zip(loops, samples, strict=True)
    ]


def mean_error(loops: Sequence[ExpertLoop], samples: Sequence[LayerSample], batches: Sequence[int]) -> float:
    """The mean of `layer_errors`: in a sum, late layers with large outputs would count for all."""
    errors = layer_errors(loops, samples, batches)
    return sum(errors) / len(errors)
