"""Neurons of a dense FFN, cut out of the checkpoint or out of its weights in memory."""

from jaxtyping import Int
from torch import Tensor

from models.checkpoint.reader import ShardReader
from models.dense import DenseFamily, fused_name
from models.experts import ExpertWeights
from models.ffn import DenseFFN


def read_part(reader: ShardReader, name: str) -> Tensor:
    """A tensor of a dense checkpoint; gate, up, q, k or v out of the fused one where that is what there is.

    Raises:
        CheckpointError: neither is there.
    """
    whole = fused_name(name)
    if name in reader.names or whole not in reader.names:
        return reader.tensor(name)
    rows = _fused_rows(reader, name, whole)
    # The other parts would stay in memory as long as this one.
    return reader.tensor(whole)[rows].clone()


def _fused_rows(reader: ShardReader, name: str, whole: str) -> slice:
    count, part = reader.shape(whole)[0], name.split(".")[-2]
    if part in {"gate_proj", "up_proj"}:
        return slice(0, count // 2) if part == "gate_proj" else slice(count // 2, count)
    # As wide as what the output projection takes; k and v share the rest.
    queries = reader.shape(whole.replace("qkv_proj", "o_proj"))[1]
    keys = (count - queries) // 2
    starts = {"q_proj": (0, queries), "k_proj": (queries, queries + keys), "v_proj": (queries + keys, count)}
    return slice(*starts[part])


def slice_experts(
    reader: ShardReader,
    family: DenseFamily,
    layer: int,
    neurons_EN: Int[Tensor, "E N"],
    always_on_S: Int[Tensor, "S"],
) -> ExpertWeights:
    """Rows of gate and up, columns of down, bit for bit.

    Memory: one dense projection beside the slices.
    """
    gate, up, down = family.ffn(layer)
    gate_END, shared_gate_SD = _rows(read_part(reader, gate), neurons_EN, always_on_S)
    up_END, shared_up_SD = _rows(read_part(reader, up), neurons_EN, always_on_S)
    down_EDN, shared_down_DS = _columns(read_part(reader, down), neurons_EN, always_on_S)
    return ExpertWeights(gate_END, up_END, down_EDN, shared_gate_SD, shared_up_SD, shared_down_DS)


def _rows(weight_FD: Tensor, neurons_EN: Tensor, always_on_S: Tensor) -> tuple[Tensor, Tensor]:
    rows = weight_FD.index_select(0, neurons_EN.flatten())
    return rows.view(*neurons_EN.shape, weight_FD.shape[1]), weight_FD.index_select(0, always_on_S)


def _columns(weight_DF: Tensor, neurons_EN: Tensor, always_on_S: Tensor) -> tuple[Tensor, Tensor]:
    columns_EDN = weight_DF.new_empty(len(neurons_EN), len(weight_DF), neurons_EN.shape[1])
    for expert_DN, neurons_N in zip(columns_EDN, neurons_EN, strict=True):
        expert_DN.copy_(weight_DF.index_select(1, neurons_N))
    return columns_EDN, weight_DF.index_select(1, always_on_S)


def slice_ffn(ffn: DenseFFN, neurons_EN: Int[Tensor, "E N"], always_S: Int[Tensor, "S"]) -> ExpertWeights:
    """The same out of a layer's weights in memory."""
    neurons_EN, always_S = neurons_EN.long(), always_S.long()
    return ExpertWeights(
        ffn.gate_FD[neurons_EN],
        ffn.up_FD[neurons_EN],
        ffn.down_DF[:, neurons_EN].movedim(1, 0).contiguous(),
        ffn.gate_FD[always_S],
        ffn.up_FD[always_S],
        ffn.down_DF[:, always_S],
    )
