"""Tensor parallelism of transformers (`tp_plan`): weights are DTensors, activations what each process has of them.

A layer's activations are a part where they are narrower than the layer says; the weight tells which part. FSDP, whose
weights are whole while a layer runs, changes nothing.
"""

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from models.dump.tokens import Part

_HEADS, _TOKENS = 1, 2  # of (batch, heads, tokens, head_dim)
TENSOR_PARALLEL = "tp"


def find_mesh_coordinates(roots: Sequence[nn.Module]) -> dict[str, tuple[int, int]]:
    """This process's place along every axis of the meshes that weights are spread over; {} where none is."""
    return {
        name: (mesh.get_local_rank(axis), mesh.size(axis))
        for root in roots
        for weight in root.parameters()
        if _is_sharded(weight)
        for mesh in [weight.device_mesh]  # type: ignore[attr-defined]
        for axis, name in enumerate(mesh.mesh_dim_names or (TENSOR_PARALLEL,))
    }


def take_local(weight: Tensor) -> tuple[Tensor, Part]:
    """What this process has of a weight, and where that lies in the whole."""
    if not _is_sharded(weight):
        return weight, Part.whole(weight, None)
    sharded: Any = weight
    offset = [0] * weight.ndim
    for axis, placement in enumerate(sharded.placements):
        if placement.is_shard():
            chunk = -(-weight.shape[placement.dim] // sharded.device_mesh.size(axis))
            begin = sharded.device_mesh.get_local_rank(axis) * chunk
            offset[placement.dim] = min(begin, weight.shape[placement.dim])
    return sharded.to_local(), Part(tuple(weight.shape), tuple(offset), None)


def part_of_features(tensor: Tensor, module: nn.Linear, axis: int, token_axis: int | None) -> Part:
    """Of a layer's output (`axis` 0 of the weight) or input (1): a part of the features, or all of them."""
    width = (module.out_features, module.in_features)[axis]
    if not _is_sharded(module.weight) or tensor.shape[-1] == width:
        return Part.whole(tensor, token_axis)
    begin = take_local(module.weight)[1].offset[axis]
    return Part((*tensor.shape[:-1], width), (*[0] * (tensor.ndim - 1), begin), token_axis)


def part_of_heads(tensor: Tensor, module: nn.Module, name: str) -> Part:
    """Of a query, key or value: the heads that a process has."""
    config = getattr(module, "config", None)
    heads = getattr(config, "num_attention_heads" if name == "query" else "num_key_value_heads", None)
    place = find_mesh_coordinates([module]).get(TENSOR_PARALLEL)
    if place is None or heads is None or tensor.shape[_HEADS] == heads:
        return Part.whole(tensor, _TOKENS)
    return Part.of_axis(tensor, _HEADS, *place, _TOKENS)


def _is_sharded(weight: Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # nobody has a DTensor who did not import it
    return module is not None and isinstance(weight, module.DTensor)
