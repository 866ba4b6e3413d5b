"""A layer's dense weights cut into experts, in memory."""

from jaxtyping import Float, Int
from torch import Tensor

from models.experts import LayerExperts
from models.ffn import DenseFFN


def slice_ffn(ffn: DenseFFN, units_EN: Int[Tensor, "E N"], always_S: Int[Tensor, "S"]) -> LayerExperts:
    """A layer's units as experts: rows of gate and up, columns of down."""
    always = always_S.long()
    return LayerExperts(
        slice_matrix("gate", ffn.gate_FD, units_EN),
        slice_matrix("up", ffn.up_FD, units_EN),
        slice_matrix("down", ffn.down_DF, units_EN),
        ffn.gate_FD[always],
        ffn.up_FD[always],
        ffn.down_DF[:, always],
    )


def slice_matrix(name: str, matrix: Float[Tensor, "A B"], units_EN: Int[Tensor, "E N"]) -> Float[Tensor, "E P Q"]:
    """Rows of gate and up (E, N, D), columns of down (E, D, N); for weights and gradients alike."""
    units = units_EN.long()
    sliced: Tensor = matrix[:, units].movedim(1, 0).contiguous() if name == "down" else matrix[units]
    return sliced
