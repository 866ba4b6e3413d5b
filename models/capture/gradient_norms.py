"""Exact per-sample weight-gradient norms, row by row, without weight gradients.

For one sample with inputs X (T, D) and output gradients G (T, F), the gradient of row j of the weight is Gᵀ_j X, so
‖∇W_j‖² = G_jᵀ (X Xᵀ) G_j. The Gram matrix X Xᵀ is shared by all F rows.
"""

import torch
from jaxtyping import Float
from torch import Tensor


def break_even_length(hidden_size: int, intermediate_size: int) -> float:
    """Sequence length above which the direct product costs less than the Gram product.

    Gram products of one FFN cost T²(2D + 3F), direct ones 3TDF.
    """
    return 3 * hidden_size * intermediate_size / (2 * hidden_size + 3 * intermediate_size)


def prefer_gram(product: str, length: int, hidden_size: int, intermediate_size: int) -> bool:
    """Whether to use the Gram product: asked for, or cheaper."""
    if product != "auto":
        return product == "gram"
    return length <= break_even_length(hidden_size, intermediate_size)


def gram(x_BTD: Float[Tensor, "B T D"]) -> Float[Tensor, "B T T"]:
    """Per-sample Gram matrix X Xᵀ in fp32."""
    x = x_BTD.float()
    return x @ x.mT


def row_norms_from_gram(gram_BTT: Float[Tensor, "B T T"], grad_BTF: Float[Tensor, "B T F"]) -> Float[Tensor, "B F"]:
    """‖∇W_j‖ for every sample and row: sqrt(G_jᵀ · Gram · G_j).

    Numerics: fp32; rounding can leave a square just below zero, which counts as zero.
    """
    grad = grad_BTF.float()
    squares: Tensor = (grad * (gram_BTT @ grad)).sum(1)
    return squares.clamp_min_(0).sqrt_()


def row_norms_direct(
    x_BTD: Float[Tensor, "B T D"], grad_BTF: Float[Tensor, "B T F"], chunk: int = 4096
) -> Float[Tensor, "B F"]:
    """‖∇W_j‖ for every sample and row from Gᵀ X itself, `chunk` rows at a time."""
    x, grad = x_BTD.float(), grad_BTF.float()
    parts = [(grad[..., first : first + chunk].mT @ x).norm(dim=-1) for first in range(0, grad.shape[-1], chunk)]
    return torch.cat(parts, dim=-1)
