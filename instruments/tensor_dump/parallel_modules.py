"""Modules of megatron-core and TransformerEngine, found by the names of their classes, and each process's part.

Axes are Megatron's: (tokens, batch, features) and (tokens, batch, heads, head_dim). With sequence parallelism the
tokens of a column-parallel layer's input and of a row-parallel layer's output are split over the group;
`DumpReader.join` joins the parts.
"""

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from instruments.tensor_dump.config import ATTENTION, EMBEDDING, LINEAR, NORM_LINEAR
from instruments.tensor_dump.index import Placement
from instruments.tensor_dump.modules import hook_attention, hook_layer, layer_of
from instruments.tensor_dump.recorder import Watched

# Package → class → kind of module. Megatron's TEColumnParallelLinear, TEDotProductAttention ... are subclasses of
# TransformerEngine's. The input of a LayerNormLinear is that of its norm: the kernel does not expose the norm's output.
_MEGATRON, _ENGINE = "megatron.core", "transformer_engine"
_KINDS = {
    _MEGATRON: {
        "ColumnParallelLinear": LINEAR, "RowParallelLinear": LINEAR, "VocabParallelEmbedding": EMBEDDING,
        "DotProductAttention": ATTENTION,
    },
    _ENGINE: {"Linear": LINEAR, "LayerNormLinear": NORM_LINEAR, "DotProductAttention": ATTENTION},
}  # fmt: skip
_MODES = {"ColumnParallelLinear": "column", "RowParallelLinear": "row"}  # TransformerEngine's have a parallel_mode
# Coordinate → group name in the functions of parallel_state.
_COORDINATES = {
    "tp": "tensor_model_parallel", "pp": "pipeline_model_parallel", "cp": "context_parallel", "dp": "data_parallel",
    "ep": "expert_model_parallel",
}  # fmt: skip


def find_parallel(root: nn.Module) -> Iterator[Watched]:
    """Every module of these classes or a subclass, its layer counted over all pipeline stages."""
    numbers: dict[str, int] = {}
    for name, module in root.named_modules():
        if isinstance(number := getattr(module, "layer_number", None), int):
            numbers[name] = number - 1
        package, kind = _class_of(module)
        if not package:
            continue
        layer_type, layer = _KINDS[package][kind], _layer(name, numbers)
        if layer_type == ATTENTION:
            yield Watched(name, module, layer_type, layer, hook_attention, partial(_place_of_heads, module))
        elif layer_type == EMBEDDING:
            yield Watched(name, module, layer_type, None, hook_layer, partial(_place_of_embedding, module))
        else:
            mode = _MODES.get(kind) or getattr(module, "parallel_mode", None)
            hook = partial(hook_layer, given_weight=_given_weight) if package == _MEGATRON else hook_layer
            yield Watched(name, module, layer_type, layer, hook, partial(_place_of_linear, module, mode))


def find_coordinates() -> dict[str, tuple[int, int]]:
    """This process's coordinate in each of Megatron's kinds of parallelism; {} before it has initialised them."""
    ask: Any = sys.modules.get("megatron.core.parallel_state")
    if ask is None or not ask.model_parallel_is_initialized():
        return {}
    return {
        name: (getattr(ask, f"get_{group}_rank")(), getattr(ask, f"get_{group}_world_size")())
        for name, group in _COORDINATES.items()
    }


def _class_of(module: nn.Module) -> tuple[str, str]:
    """Package and name of the known class that the module is of; empty for others."""
    for kind in type(module).__mro__:
        for package, names in _KINDS.items():
            if kind.__module__.startswith(f"{package}.") and kind.__name__ in names:
                return package, kind.__name__
    return "", ""


def _place_of_linear(module: Any, mode: str | None, name: str, tensor: Tensor) -> Placement:  # noqa: ANN401
    """A weight split along its outputs (`mode` column) or its inputs (row), or whole.

    The features of the side that is split are parts; on the other side, the tokens may be.
    """
    by_column = mode == "column"
    # Gate and up may be one layer: each process holds its share of both.
    pieces = int(getattr(getattr(module, "weight", None), "partition_stride", 1))
    if name == "weight":
        return (
            _part(module, tensor, 0 if by_column else 1, None, pieces) if mode else Placement.whole(tensor.shape, None)
        )
    if mode is None:
        return Placement.whole(tensor.shape, 0)
    if by_column == (name == "input"):
        return _part(module, tensor, 0, 0) if module.sequence_parallel else Placement.whole(tensor.shape, 0)
    # A row-parallel input may be split by the layer itself, a column-parallel output gathered by it or by the call.
    if by_column:
        is_split = tensor.shape[-1] != getattr(module, "output_size", None)
    else:
        is_split = getattr(module, "input_is_parallel", True)
    return _part(module, tensor, tensor.ndim - 1, 0, pieces) if is_split else Placement.whole(tensor.shape, 0)


def _place_of_heads(module: Any, name: str, tensor: Tensor) -> Placement:  # noqa: ANN401
    """Heads are split over processes; with fewer groups of keys than processes, several hold the same group."""
    tokens = 1 if getattr(module, "qkv_format", "sbhd") == "bshd" else 0
    if name == "output":
        return _part(module, tensor, tensor.ndim - 1, tokens)
    axis, (rank, size) = tensor.ndim - 2, _group(module)
    groups = getattr(getattr(module, "config", None), "num_query_groups", None)
    heads = groups if groups and name != "query" else tensor.shape[axis] * size
    shape, offset = list(tensor.shape), [0] * tensor.ndim
    shape[axis], offset[axis] = heads, rank * heads // size
    return Placement(tuple(shape), tuple(offset), tokens)


def _place_of_embedding(module: Any, name: str, tensor: Tensor) -> Placement:  # noqa: ANN401
    """Each process holds some rows of the table; ids and output, (batch, tokens, features), are whole."""
    if name == "weight":
        return _part(module, tensor, 0, None)
    # Sequence parallelism: the output is (tokens, batch, features).
    scattered = name == "output" and getattr(module, "reduce_scatter_embeddings", False)
    return _part(module, tensor, 0, 0) if scattered else Placement.whole(tensor.shape, 1)


def _given_weight(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    return args[1] if len(args) > 1 else kwargs.get("weight")


def _part(module: nn.Module, tensor: Tensor, axis: int, tokens: int | None, pieces: int = 1) -> Placement:
    return Placement.of_axis(tensor.shape, axis, *_group(module), tokens, pieces)


def _group(module: nn.Module) -> tuple[int, int]:
    """This process's rank in the module's tensor-parallel group, and the group's size."""
    group: Any = getattr(module, "tp_group", None)
    if group is not None:
        return torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    return find_coordinates().get("tp", (0, 1))


def _layer(name: str, numbers: dict[str, int]) -> int | None:
    """The layer number of the closest enclosing module that has one; else the number in the name."""
    around = name
    while around:
        if around in numbers:
            return numbers[around]
        around = around.rpartition(".")[0]
    return layer_of(name)
