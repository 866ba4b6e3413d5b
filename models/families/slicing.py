"""Units of a dense FFN, cut out of the checkpoint."""

from jaxtyping import Int
from torch import Tensor

from models.checkpoint.reader import ShardReader
from models.experts import LayerExperts
from models.families.dense import DenseFamily
from models.families.fused_reading import read_part


def slice_experts(
    reader: ShardReader,
    family: DenseFamily,
    layer: int,
    units_EN: Int[Tensor, "E N"],
    always_on_S: Int[Tensor, "S"],
) -> LayerExperts:
    """Rows of gate and up, columns of down, bit for bit.

    Memory: one dense projection beside the slices.
    """
    gate, up, down = family.ffn(layer)
    gate_END, shared_gate_SD = _rows(read_part(reader, gate), units_EN, always_on_S)
    up_END, shared_up_SD = _rows(read_part(reader, up), units_EN, always_on_S)
    down_EDN, shared_down_DS = _columns(read_part(reader, down), units_EN, always_on_S)
    return LayerExperts(gate_END, up_END, down_EDN, shared_gate_SD, shared_up_SD, shared_down_DS)


def _rows(weight_FD: Tensor, units_EN: Tensor, always_on_S: Tensor) -> tuple[Tensor, Tensor]:
    rows = weight_FD.index_select(0, units_EN.flatten())
    return rows.view(*units_EN.shape, weight_FD.shape[1]), weight_FD.index_select(0, always_on_S)


def _columns(weight_DF: Tensor, units_EN: Tensor, always_on_S: Tensor) -> tuple[Tensor, Tensor]:
    columns_EDN = weight_DF.new_empty(len(units_EN), len(weight_DF), units_EN.shape[1])
    for expert_DN, units_N in zip(columns_EDN, units_EN, strict=True):
        expert_DN.copy_(weight_DF.index_select(1, units_N))
    return columns_EDN, weight_DF.index_select(1, always_on_S)
