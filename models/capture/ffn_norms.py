"""Weight-gradient norms of a gated FFN's units, by sample."""

from jaxtyping import Float
from torch import Tensor

from models.capture.ffn_probe import FFNGradients
from models.capture.gradient_norms import column_squares, gram_matrix, prefer_gram


def unit_norms(record: FFNGradients, product: str) -> dict[str, Float[Tensor, "B F"]]:
    """‖∇gate row‖, ‖∇up row‖ and ‖∇down column‖ for every sample and unit.

    Column j of down sees input h_j and output gradient Δ: ‖∇W_{:,j}‖² = h_jᵀ(ΔΔᵀ)h_j. Row j of gate and up is the same
    with input and gradient exchanged: g_jᵀ(XXᵀ)g_j.

    Args:
        record: one layer's tensors of one batch.
        product: gram, direct, or auto for the cheaper one.
    """
    (_, length, hidden_size), width = record.x_BTD.shape, record.h_BTF.shape[-1]
    gram = units_prefer_gram(product, length, hidden_size, width)
    inputs_BTT = gram_matrix(record.x_BTD) if gram else None  # shared by gate and up
    squares = {
        "gate": column_squares(record.gate_grad_BTF, record.x_BTD, gram=gram, gram_BTT=inputs_BTT),
        "up": column_squares(record.up_grad_BTF, record.x_BTD, gram=gram, gram_BTT=inputs_BTT),
        "down": column_squares(record.h_BTF, record.out_grad_BTD, gram=gram),
    }
    return {name: squares_BF.sqrt_() for name, squares_BF in squares.items()}


def units_prefer_gram(product: str, length: int, hidden_size: int, width: int) -> bool:
    """Whether the units' norms go by Gram matrices: T×T ones of the narrow side, met by the wide side."""
    return prefer_gram(product, length, width, hidden_size, rows=False)
