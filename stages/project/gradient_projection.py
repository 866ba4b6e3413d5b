"""Gradient projection: W_small = W_base + sign·β·α·λ·∇W / (‖∇W‖₂ + ε), for every neuron's own weights."""

from dataclasses import fields, replace

import torch
from jaxtyping import Float
from torch import Tensor

from models.experts import LayerExperts

# Matrix of the settings → fields of LayerExperts: routed experts, always-on neurons.
FIELDS = {
    "gate": ("gate_END", "shared_gate_SD"),
    "up": ("up_END", "shared_up_SD"),
    "down": ("down_EDN", "shared_down_DS"),
}


def project_neurons(
    weight: Float[Tensor, "*E P Q"], gradient: Float[Tensor, "*E P Q"], *, length: float, epsilon: float, dim: int
) -> Float[Tensor, "*E P Q"]:
    """Move every neuron along its own normalised gradient.

    Normalised per neuron, those that few tokens reach move as far as the busy ones; with one norm for each expert the
    loss fell less (conf/experiment/gradient_projection.yaml).

    Args:
        weight: gate or up, a neuron in each row, or down, a neuron in each column; with or without a leading E.
        gradient: of the loss, of the same shape and any scale.
        length: sign·β·α·λ, the L2 norm of each neuron's step; negative goes down the gradient.
        epsilon: keeps a vanishing gradient from being blown up.
        dim: along which a neuron's numbers lie, -1 for rows and -2 for columns.
    """
    norms = gradient.norm(dim=dim, keepdim=True)
    return torch.addcdiv(weight, gradient, norms + epsilon, value=length)


def neuron_dim(field: str) -> int:
    """Along which dimension of that field of LayerExperts a neuron's numbers lie."""
    return -2 if "down" in field else -1


def rms_neuron(weight: Float[Tensor, "*E P Q"], dim: int) -> float:
    """Root mean square of the neurons' norms; `dim` as of `project_neurons`."""
    return float(weight.norm(dim=dim).square().mean().sqrt())


def sample_experts(experts: LayerExperts, seed: int) -> LayerExperts:
    """Seeded normal experts with the standard deviation of the extracted ones; always-on neurons are kept."""
    generator = torch.Generator().manual_seed(seed)

    def sample(weight: Tensor) -> Tensor:
        return torch.randn(weight.shape, generator=generator).to(weight) * weight.std()

    return replace(experts, **{routed: sample(getattr(experts, routed)) for routed, _ in FIELDS.values()})


def projected_fields(matrices: list[str]) -> list[str]:
    """Fields of LayerExperts that the named matrices stand for, in the order of its fields."""
    named = {field for matrix in matrices for field in FIELDS[matrix]}
    return [spec.name for spec in fields(LayerExperts) if spec.name in named]
