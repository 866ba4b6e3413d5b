"""The experts of a global pool, cut out of the dense model, and each layer's own view of them."""

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import torch

from models.checkpoint.reader import ShardReader
from models.experts import LayerExperts
from models.families.dense import dense_family
from models.families.slicing import slice_experts
from models.source import read_config
from stages.contracts.pool_partition import PoolPartition

ROUTED = ("gate_END", "up_END", "down_EDN")


def cut_pool(folder: Path, partition: PoolPartition, device: torch.device) -> list[LayerExperts]:
    """What every layer gives to the pool, and its own always-on units, fp32.

    Memory: the whole pool.
    """
    family = dense_family(read_config(folder))
    with ShardReader(folder) as reader:
        return [
            to_float(slice_experts(reader, family, layer, partition.units_of(layer), always_S), device)
            for layer, always_S in enumerate(partition.always_on)
        ]


def to_float(experts: LayerExperts, device: torch.device) -> LayerExperts:
    """The same in fp32 on a device."""
    wide = {spec.name: getattr(experts, spec.name).to(device, torch.float32) for spec in fields(experts)}
    return LayerExperts(**wide)


def join_pool(parts: Sequence[LayerExperts]) -> list[LayerExperts]:
    """For every layer: all experts of the pool, one memory for all layers, beside the layer's own always-on units."""
    pool = {name: torch.cat([getattr(part, name) for part in parts]) for name in ROUTED}
    return [replace(part, **pool) for part in parts]
