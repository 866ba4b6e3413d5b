"""TransformerEngine: Linear, LayerNormLinear and DotProductAttention, found by name and not imported.

Megatron's TEColumnParallelLinear, TELayerNormColumnParallelLinear, TERowParallelLinear and TEDotProductAttention are
subclasses. The input of a LayerNormLinear is what comes before the norm: the kernel keeps the rest to itself.
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
    """Every module that is one of the three, or a subclass."""
    for name, module in root.named_modules(prefix=prefix):
        own = (kind for kind in type(module).__mro__ if kind.__module__.startswith("transformer_engine."))
        layer_type = next((_KINDS[kind.__name__] for kind in own if kind.__name__ in _KINDS), None)
        if layer_type is not None:
            number = getattr(module, "layer_number", None)  # Megatron's, over all stages of the pipeline
            layer = number - 1 if isinstance(number, int) else layer_of(name)
            yield Watched(name, module, layer_type, layer, watch_attention if layer_type == ATTENTION else watch_linear)


def watch_linear(watched: Watched, recorder: Recorder) -> list[RemovableHandle]:
    """A weight cut along its outputs (parallel_mode column) or its inputs (row), or a whole one."""
    module: Any = watched.module
    mode, size = module.parallel_mode, module.tp_size
    rank = torch.distributed.get_rank(module.tp_group) if size > 1 else 0

    def cut(tensor: Tensor, axis: int) -> Part:
        return Part.of_axis(tensor, axis, rank, size, _tokens(tensor))

    def input_part(inputs: Tensor) -> Part:
        if mode == "row":
            return cut(inputs, inputs.ndim - 1)
        return cut(inputs, 0) if mode == "column" and module.sequence_parallel else Part.whole(inputs, _tokens(inputs))

    def weight(_args: object, _kwargs: object) -> tuple[Tensor, Part]:
        axis = {"column": 0, "row": 1}.get(mode)
        whole = Part.whole(module.weight, None)
        return module.weight, whole if axis is None else Part.of_axis(module.weight, axis, rank, size, None)

    def output(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, Part]:
        tensor = result if isinstance(result, Tensor) else result[0]  # with the bias, or the norm's output
        if mode == "column":
            return tensor, cut(tensor, tensor.ndim - 1)
        return tensor, cut(tensor, 0) if mode == "row" and module.sequence_parallel else Part.whole(
            tensor, _tokens(tensor)
        )

    return hook_layer(watched, recorder, input_part=input_part, weight=weight, output=output)


def watch_attention(watched: Watched, recorder: Recorder) -> list[RemovableHandle]:
    """Heads are the axis before the last, tokens the first of sbhd and thd and the second of bshd."""
    module: Any = watched.module
    tokens = 1 if getattr(module, "qkv_format", "sbhd") == "bshd" else 0
    size = getattr(module, "tp_size", 1)
    rank = torch.distributed.get_rank(module.tp_group) if size > 1 else 0
    return hook_attention(
        watched,
        recorder,
        lambda _name, heads: Part.of_axis(heads, heads.ndim - 2, rank, size, tokens),
        lambda output: Part.of_axis(output, output.ndim - 1, rank, size, tokens),
    )


def _tokens(tensor: Tensor) -> int | None:
    """Of (tokens, batch, features)."""
    return 0 if tensor.ndim == 3 else None
