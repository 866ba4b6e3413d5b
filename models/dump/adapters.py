"""Who knows which part of a model: every adapter's modules, hooks and coordinates."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import nn

from models.dump.attention_modules import AttentionWatch, find_attentions
from models.dump.config import ATTENTION, EXPERTS
from models.dump.experts_modules import find_experts, watch_experts
from models.dump.linear_modules import find_linears, watch_linear
from models.dump.recorder import Recorder
from models.dump.rows import Identity
from models.dump.sharded_weights import find_mesh_coordinates
from models.dump.watched import Watched


class Handle(Protocol):
    """What takes a hook off."""

    def remove(self) -> None:
        """Once."""


def find_modules(roots: Sequence[nn.Module]) -> list[Watched]:
    """All that can be watched, by every adapter that knows a part of the model."""
    found: list[Watched] = []
    for number, root in enumerate(roots):
        prefix = f"chunk{number}" if len(roots) > 1 else ""
        mine = [*find_linears(root, prefix), *find_attentions(root, prefix), *find_experts(root, prefix)]
        if "megatron.core" in sys.modules:
            from models.dump.megatron_modules import find_megatron  # noqa: PLC0415 - an optional extra

            mine += find_megatron(root, prefix)
        found += [replace(one, chunk=number) for one in mine]
    return found


def watch(one: Watched, recorder: Recorder) -> Sequence[Handle]:
    """Put the adapter's hooks on a module."""
    if isinstance(one.module, nn.Linear):
        return watch_linear(one, recorder)
    if one.layer_type == EXPERTS:
        return watch_experts(one, recorder)
    if "megatron.core" in sys.modules:
        from models.dump.megatron_modules import is_megatron, watch_megatron  # noqa: PLC0415

        if is_megatron(one.module):
            return watch_megatron(one, recorder)
    assert one.layer_type == ATTENTION
    return [AttentionWatch(one, recorder)]


def find_identity(roots: Sequence[nn.Module]) -> Identity:
    """This process among those of its job: torch.distributed's rank, and coordinates where there are any."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return Identity(0, 1, {})
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if "megatron.core" in sys.modules:
        from models.dump.megatron_modules import find_coordinates  # noqa: PLC0415

        if found := find_coordinates():
            return Identity(rank, world, found)
    return Identity(rank, world, find_mesh_coordinates(roots))
