"""S_p: units that are highly active, often active, and stable under the gradient matter most."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from stages.score.normalise import Normalisation, has_spread, normalise

Form = Literal["weighted", "product", "inverse_gradient"]


@dataclass(frozen=True)
class SynergyWeights:
    """How much each term of S_p counts; none is negative."""

    activation: float
    gradient: float
    frequency: float


def score_synergy(
    activation_LF: Float[Tensor, "L F"],
    gradients_LF: Sequence[Float[Tensor, "L F"]],
    frequency_LF: Float[Tensor, "L F"],
    *,
    weights: SynergyWeights,
    form: Form,
    normalisation: Normalisation,
) -> Float[Tensor, "L F"]:
    """Join activation A, gradient G and frequency F into S_p, each term normalised within its layer.

    weighted: a·A − g·G + f·F; product: Aᵃ·(1−G)ᵍ·Fᶠ; inverse_gradient: (a·A + f·F) / (1 + g·G). The last two stretch
    every term to 0..1 first. A term without spread leaves the order of the others as it is.

    Args:
        activation_LF: ``(L, F)`` mean |h|·‖d‖, or mean |h|.
        gradients_LF: ``(L, F)`` of each kind (gate, up, down) the mean weight-gradient norm, or its `gradient_rate`;
            kinds are normalised apart, so that the kind of largest gradients does not speak for all.
        frequency_LF: ``(L, F)`` share of tokens where the unit is among the most active.
        weights: a, g, f.
        form: how the terms are joined.
        normalisation: zscore, rank or minmax.
    Returns:
        ``(L, F)`` fp32, finite; comparable within a layer only.
    """
    gradient_LF = torch.stack([normalise(kind_LF, normalisation) for kind_LF in gradients_LF]).mean(0)
    terms = [normalise(term_LF, normalisation) for term_LF in (activation_LF, gradient_LF, frequency_LF)]
    if form == "weighted":
        a_LF, g_LF, f_LF = terms
        return (weights.activation * a_LF - weights.gradient * g_LF + weights.frequency * f_LF).float()
    a_LF, g_LF, f_LF = (normalise(term_LF, "minmax") for term_LF in terms)
    if form == "inverse_gradient":
        gain_LF = weights.activation * a_LF + weights.frequency * f_LF
        return (gain_LF / (1 + weights.gradient * g_LF)).float()
    a_LF, f_LF = (torch.where(has_spread(term_LF), term_LF, 1.0) for term_LF in (a_LF, f_LF))
    return (a_LF**weights.activation * (1 - g_LF) ** weights.gradient * f_LF**weights.frequency).float()


def gradient_rate(norms_LF: Float[Tensor, "L F"], activation_LF: Float[Tensor, "L F"]) -> Float[Tensor, "L F"]:
    """log(‖∇W‖ / activation): how strongly the loss pulls at a neuron for what it adds.

    A neuron that is highly active has large weight gradients for that alone; what is left is how far from settled it
    is. Neurons that are never active come out near the layer's mean; a layer without gradients is 0 throughout.
    """
    norms_LF, activation_LF = (values + 1e-6 * values.mean(1, keepdim=True) for values in (norms_LF, activation_LF))
    tiny = torch.finfo(norms_LF.dtype).tiny
    rate_LF = norms_LF.clamp_min(tiny).log() - activation_LF.clamp_min(tiny).log()
    return torch.where(norms_LF.any(1, keepdim=True), rate_LF, 0.0)
