"""A process's part of a tensor that all processes hold together, and the token positions that are kept of it."""

import re
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from instruments.tensor_dump.config import DumpConfig
from instruments.tensor_dump.index import Placement
from instruments.tensors import is_sharded


@dataclass(frozen=True)
class RankInfo:
    """Rank of this process and its coordinates in the parallel groups."""

    rank: int
    world: int
    parallel: Mapping[str, tuple[int, int]]  # tp, pp ...: coordinate and group size


def rank_and_world() -> tuple[int, int]:
    """Rank of this process in torch.distributed, and the number of processes."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def layer_of(name: str) -> int | None:
    """The first number in a module's name: 3 for model.layers.3.mlp.experts.5.up_proj."""
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return int(found[1]) if found else None


@dataclass(frozen=True)
class Part:
    """A process's part of a tensor: the whole's shape, the part's offset, and the axis of tokens."""

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    token_axis: int | None
    pieces: tuple[int, int] | None = None  # as in `Placement`

    @classmethod
    def whole(cls, tensor: Tensor, token_axis: int | None) -> "Part":
        """The whole tensor."""
        return cls(tuple(tensor.shape), (0,) * tensor.ndim, token_axis)

    @classmethod
    def of_axis(
        cls, tensor: Tensor, axis: int, index: int, parts: int, token_axis: int | None, pieces: int = 1
    ) -> "Part":
        """Part number `index` of `parts` equal ones along `axis`.

        With `pieces` > 1 the axis concatenates that many matrices (gate and up), and a part holds its share of each.
        """
        shape, offset = list(tensor.shape), [0] * tensor.ndim
        offset[axis], shape[axis] = index * shape[axis] // pieces, parts * shape[axis]
        return cls(tuple(shape), tuple(offset), token_axis, (axis, pieces) if pieces > 1 and parts > 1 else None)


def part_of_weight(weight: Tensor) -> Part:
    """This process's part of a weight, which may be sharded."""
    if not is_sharded(weight):
        return Part.whole(weight, None)
    sharded: Any = weight
    offset = [0] * weight.ndim
    for axis, placement in enumerate(sharded.placements):
        if placement.is_shard():
            chunk = -(-weight.shape[placement.dim] // sharded.device_mesh.size(axis))
            begin = sharded.device_mesh.get_local_rank(axis) * chunk
            offset[placement.dim] = min(begin, weight.shape[placement.dim])
    return Part(tuple(weight.shape), tuple(offset), None)


def keep_tokens(tensor: Tensor, part: Part, config: DumpConfig) -> tuple[Tensor, Placement]:
    """The kept positions of a tensor, and their place among the kept positions of all parts.

    Positions count over the whole sequence, also where a process holds only part of it.
    """
    axis = part.token_axis
    first, every, most = config.first_token, config.every_tokens, config.max_tokens
    if axis is None or (first, every, most) == (0, 1, None):
        return tensor, Placement(part.global_shape, part.offset, part.pieces)
    chosen = range(part.global_shape[axis])[first::every][:most]
    begin, end = part.offset[axis], part.offset[axis] + tensor.shape[axis]
    before, until = bisect_left(chosen, begin), bisect_left(chosen, end)
    mine = chosen[before:until]
    index = [slice(None)] * tensor.ndim
    index[axis] = slice(mine[0] - begin, mine[-1] - begin + 1, every) if mine else slice(0, 0)
    shape, offset = list(part.global_shape), list(part.offset)
    shape[axis], offset[axis] = len(chosen), before
    return tensor[tuple(index)], Placement(tuple(shape), tuple(offset), part.pieces, (first, every, len(chosen)))
