"""Constants that make up for what gates weigh: an expert's columns are right on average over the tokens it serves."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from models.experts import ExpertLoop
from models.routing import has_copies, membership, relative_gates


def gate_weights(loop: ExpertLoop, x_TD: Float[Tensor, "T D"]) -> Float[Tensor, "T E"]:
    """The gates of the chosen experts, relative to equal logits; 0 elsewhere."""
    chosen_TK = loop.router.choose(x_TD, loop.top_k)
    gates_TK = relative_gates(loop.gate, x_TD @ loop.router.rows_ED.T, chosen_TK)
    return x_TD.new_zeros(len(x_TD), loop.router.experts).scatter_(1, chosen_TK, gates_TK)


def gate_moments(loop: ExpertLoop, inputs: Sequence[Tensor]) -> Float[Tensor, "2 E"]:
    """Σ_t g and Σ_t g² of every expert over the tokens that choose it, fp64."""
    device = loop.router.rows_ED.device
    moments_2E = torch.zeros(2, loop.router.experts, dtype=torch.float64, device=device)
    for x_TD in inputs:
        weights_TE = gate_weights(loop, x_TD).double()
        moments_2E += torch.stack([weights_TE.sum(0), weights_TE.square().sum(0)])
    return moments_2E


def least_squares(moments_2E: Float[Tensor, "2 E"]) -> Float[Tensor, "E"]:
    """Σ g / Σ g²: the constant c for which c·g is nearest to 1; 1 where there are no tokens."""
    first_E, second_E = moments_2E
    return torch.where(second_E > 0, first_E / second_E.clamp_min(1e-30), 1.0).float()


def column_scale(loop: ExpertLoop, inputs: Sequence[Tensor]) -> Float[Tensor, "E N"]:
    """What each expert's down columns are to be multiplied by, so that their neurons weigh 1 on average.

    First each expert's own constant; then, where neurons are in several experts, that of the sum of their copies:
    Σ_t c_j / Σ_t c_j² over the tokens for which neuron j is active, c_j the sum of its copies' scaled gates.

    Args:
        loop: the layer; its gates and its choice count, its weights do not.
        inputs: FFN inputs, a batch each.
    Numerics: 1 where gates are constant and no copies are active together; 1/multiplicity where all experts are on.
    """
    expert_E = least_squares(gate_moments(loop, inputs))
    neurons_EN = loop.neurons_EN.long()
    if not has_copies(neurons_EN):
        return expert_E[:, None].expand(neurons_EN.shape)
    member_EF = membership(neurons_EN, loop.width) * expert_E[:, None]
    moments_2F = torch.zeros(2, loop.width, dtype=torch.float64, device=expert_E.device)
    for x_TD in inputs:
        copies_TF = (gate_weights(loop, x_TD) @ member_EF).double()
        moments_2F += torch.stack([copies_TF.sum(0), copies_TF.square().sum(0)])
    return expert_E[:, None] * least_squares(moments_2F)[neurons_EN]


def scale_columns(loop: ExpertLoop, scale_EN: Float[Tensor, "E #N"]) -> ExpertLoop:
    """The layer with every expert's down columns multiplied."""
    return replace(loop, experts=replace(loop.experts, down_EDN=loop.experts.down_EDN * scale_EN[:, None]))


def scale_pool(loops: Sequence[ExpertLoop], inputs: Sequence[Sequence[Tensor]]) -> Float[Tensor, "E 1"]:
    """The same for a pool: one constant per expert, over the tokens of all layers. Neurons have no copies there."""
    moments = [gate_moments(loop, seen) for loop, seen in zip(loops, inputs, strict=True)]
    return least_squares(torch.stack(moments).sum(0))[:, None]


def at_usual_gates(loop: ExpertLoop, inputs: Sequence[Tensor]) -> ExpertLoop:
    """The layer with each expert's columns as large as its gates make them, for a router to be fitted to."""
    return scale_columns(loop, 1 / least_squares(gate_moments(loop, inputs))[:, None])
