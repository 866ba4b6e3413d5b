"""Adapters for TransformerEngine, also inside Megatron: Linear, LayerNormLinear and DotProductAttention.

The classes are found by name, without an import. Megatron's TEColumnParallelLinear, TERowParallelLinear,
TELayerNormColumnParallelLinear and TEDotProductAttention are subclasses. The input of a LayerNormLinear is that of its
norm: the kernel does not expose the norm's output.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from instruments.tensor_dump.capture import Part, Watched, layer_of
from instruments.tensor_dump.config import ATTENTION, LINEAR, NORM_LINEAR
from instruments.tensor_dump.modules import hook_attention, hook_layer
from instruments.tensor_dump.recorder import Recorder

_KINDS = {"Linear": LINEAR, "LayerNormLinear": NORM_LINEAR, "DotProductAttention": ATTENTION}


def find_transformer_engine(root: nn.Module, prefix: str) -> Iterator[Watched]:
    """Every module of one of the three classes or a subclass."""
    for name, module in root.named_modules(prefix=prefix):
        own = (kind for kind in type(module).__mro__ if kind.__module__.startswith("transformer_engine."))
        layer_type = next((_KINDS[kind.__name__] for kind in own if kind.__name__ in _KINDS), None)
        if layer_type is not None:
            number = getattr(module, "layer_number", None)  # Megatron's, counted over all pipeline stages
            layer = number - 1 if isinstance(number, int) else layer_of(name)
            watch = watch_attention if layer_type == ATTENTION else watch_linear
            yield Watched(name, module, layer_type, layer, watch)


def watch_linear(watched: Watched, recorder: Recorder) -> list[RemovableHandle]:
    """A weight split along its outputs (parallel_mode column) or inputs (row), or not split."""
    module: Any = watched.module
    mode, rank, size = module.parallel_mode, *_group(module)

    def part_of(tensor: Tensor, split_in: str) -> Part:
        """Part of an input or output: its features are split in this mode; in the other, tokens may be."""
        tokens = 0 if tensor.ndim == 3 else None  # the axis in (tokens, batch, features)
        if mode == split_in:
            return Part.of_axis(tensor, tensor.ndim - 1, rank, size, tokens)
        if mode in {"column", "row"} and module.sequence_parallel:
            return Part.of_axis(tensor, 0, rank, size, tokens)
        return Part.whole(tensor, tokens)

    def weight_part(weight: Tensor) -> Part:
        axis = {"column": 0, "row": 1}.get(mode)
        return Part.whole(weight, None) if axis is None else Part.of_axis(weight, axis, rank, size, None)

    return hook_layer(
        watched,
        recorder,
        input_part=lambda inputs: part_of(inputs, "row"),
        weight_part=weight_part,
        output_part=lambda output: part_of(output, "column"),
    )


def watch_attention(watched: Watched, recorder: Recorder) -> list[RemovableHandle]:
    """Heads are the second-last axis; tokens are the first axis in sbhd and thd, the second in bshd."""
    rank, size = _group(watched.module)
    tokens = 1 if getattr(watched.module, "qkv_format", "sbhd") == "bshd" else 0
    return hook_attention(
        watched,
        recorder,
        lambda _name, heads: Part.of_axis(heads, heads.ndim - 2, rank, size, tokens),
        lambda output: Part.of_axis(output, output.ndim - 1, rank, size, tokens),
    )


def _group(module: Any) -> tuple[int, int]:  # noqa: ANN401 - a module of TransformerEngine
    """This process's rank in the tensor-parallel group, and the group's size."""
    size = getattr(module, "tp_size", 1)
    return (torch.distributed.get_rank(module.tp_group) if size > 1 else 0), size
