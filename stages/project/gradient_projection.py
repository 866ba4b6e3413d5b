"""Gradient projection: W_small = W_base + sign·β·α·∇W / (‖∇W‖₂ + ε), for each expert's own matrices."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from models.experts import LayerExperts
from stages.calibration.slices import slice_matrix

# Matrix of the config → field of LayerExperts.
FIELDS = {"gate": "gate_END", "up": "up_END", "down": "down_EDN"}


def project_matrix(
    weight: Float[Tensor, "E P Q"], gradient: Float[Tensor, "E P Q"], *, strength: float, epsilon: float
) -> Float[Tensor, "E P Q"]:
    """Step along each expert's own normalised gradient.

    Args:
        weight: one matrix per expert.
        gradient: its mean gradient, sliced like the expert; any scale.
        strength: sign·β·α, the Frobenius norm of the step.
        epsilon: keeps a vanishing gradient from being blown up.
    """
    norms_E = gradient.flatten(1).norm(dim=1)
    step: Tensor = strength * gradient / (norms_E + epsilon)[:, None, None]
    return weight + step


def project_experts(
    experts: LayerExperts,
    gradients: Mapping[str, Tensor],
    units_EN: Int[Tensor, "E N"],
    *,
    strength: float,
    epsilon: float,
) -> LayerExperts:
    """Project every matrix a gradient is given for; always-on units stay as they are.

    Args:
        experts: W_base.
        gradients: name of the matrix → the dense layer's mean gradient, shaped like the dense weight.
        units_EN: the units of each expert.
        strength: sign·β·α.
        epsilon: see `project_matrix`.
    """
    changed = {
        FIELDS[name]: project_matrix(
            getattr(experts, FIELDS[name]), slice_matrix(name, gradient, units_EN), strength=strength, epsilon=epsilon
        )
        for name, gradient in gradients.items()
    }
    return replace(experts, **changed)


def draw_experts(experts: LayerExperts, seed: int) -> LayerExperts:
    """Seeded normal experts with the standard deviation of the extracted ones; always-on units are kept."""
    generator = torch.Generator().manual_seed(seed)

    def draw(weight: Tensor) -> Tensor:
        return torch.randn(weight.shape, generator=generator).to(weight) * weight.std()

    return replace(experts, **{field: draw(getattr(experts, field)) for field in FIELDS.values()})
