"""A layer's dense weights cut into experts, in memory."""

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from models.checkpoint.reader import ShardReader
from models.dense import dense_family
from models.experts import LayerExperts, slice_experts
from models.ffn import DenseFFN
from models.source import read_config
from stages.artifacts.partition import PoolPartition


def slice_ffn(ffn: DenseFFN, neurons_EN: Int[Tensor, "E N"], always_S: Int[Tensor, "S"]) -> LayerExperts:
    """A layer's neurons as experts: rows of gate and up, columns of down."""
    always = always_S.long()
    return LayerExperts(
        slice_matrix("gate", ffn.gate_FD, neurons_EN),
        slice_matrix("up", ffn.up_FD, neurons_EN),
        slice_matrix("down", ffn.down_DF, neurons_EN),
        ffn.gate_FD[always],
        ffn.up_FD[always],
        ffn.down_DF[:, always],
    )


def slice_matrix(name: str, matrix: Float[Tensor, "A B"], neurons_EN: Int[Tensor, "E N"]) -> Float[Tensor, "E P Q"]:
    """Rows of gate and up (E, N, D), columns of down (E, D, N); for weights and gradients alike."""
    neurons = neurons_EN.long()
    sliced: Tensor = matrix[:, neurons].movedim(1, 0).contiguous() if name == "down" else matrix[neurons]
    return sliced


ROUTED = ("gate_END", "up_END", "down_EDN")


def cut_pool(folder: Path, partition: PoolPartition, device: torch.device) -> list[LayerExperts]:
    """What every layer gives to the pool, and its own always-on neurons, fp32.

    Memory: the whole pool.
    """
    family = dense_family(read_config(folder))
    with ShardReader(folder) as reader:
        return [
            to_float(slice_experts(reader, family, layer, partition.neurons_of(layer), always_S), device)
            for layer, always_S in enumerate(partition.always_on)
        ]


def to_float(experts: LayerExperts, device: torch.device) -> LayerExperts:
    """The same in fp32 on a device."""
    wide = {spec.name: getattr(experts, spec.name).to(device, torch.float32) for spec in fields(experts)}
    return LayerExperts(**wide)


def join_pool(parts: Sequence[LayerExperts]) -> list[LayerExperts]:
    """For every layer: all experts of the pool, one memory for all layers, beside the layer's own always-on neurons."""
    pool = {name: torch.cat([getattr(part, name) for part in parts]) for name in ROUTED}
    return [replace(part, **pool) for part in parts]
