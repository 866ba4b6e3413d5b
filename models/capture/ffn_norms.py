"""Weight-gradient norms of a gated FFN's units, by sample."""

from jaxtyping import Float
from torch import Tensor

from models.capture.ffn_probe import FFNGradients
from models.capture.gradient_norms import gram, prefer_gram, row_norms_direct, row_norms_from_gram


def unit_norms(record: FFNGradients, product: str) -> dict[str, Float[Tensor, "B F"]]:
    """‖∇gate row‖, ‖∇up row‖ and ‖∇down column‖ for every sample and unit.

    Column j of down sees input h_j and output gradient Δ: ‖∇W_{:,j}‖² = h_jᵀ(ΔΔᵀ)h_j, the row formula with the roles of
    input and gradient exchanged.

    Args:
        record: one layer's tensors of one batch.
        product: gram, direct, or auto for the cheaper one.
    """
    (_, length, hidden_size), width = record.x_BTD.shape, record.h_BTF.shape[-1]
    if prefer_gram(product, length, hidden_size, width):
        inputs_BTT, outputs_BTT = gram(record.x_BTD), gram(record.out_grad_BTD)
        return {
            "gate": row_norms_from_gram(inputs_BTT, record.gate_grad_BTF),
            "up": row_norms_from_gram(inputs_BTT, record.up_grad_BTF),
            "down": row_norms_from_gram(outputs_BTT, record.h_BTF),
        }
    return {
        "gate": row_norms_direct(record.x_BTD, record.gate_grad_BTF),
        "up": row_norms_direct(record.x_BTD, record.up_grad_BTF),
        "down": row_norms_direct(record.out_grad_BTD, record.h_BTF),
    }
