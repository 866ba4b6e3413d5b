"""How much of the FFN's output each unit and each expert carries."""

from jaxtyping import Float
from torch import Tensor

from models.ffn import DenseFFN


def unit_contributions(ffn: DenseFFN, h_TF: Float[Tensor, "T F"]) -> Float[Tensor, "T F"]:
    """|h_j|·‖d_j‖: the norm of what the unit adds to the output."""
    column_norms_F: Tensor = ffn.down_DF.norm(dim=0)
    return h_TF.abs() * column_norms_F


def expert_contributions(
    ffn: DenseFFN, h_TF: Float[Tensor, "T F"], member_EF: Float[Tensor, "E F"]
) -> Float[Tensor, "T E"]:
    """Σ_{i∈e} |h_i|·‖d_i‖ of every expert."""
    return unit_contributions(ffn, h_TF) @ member_EF.T
