"""Adapters for megatron-core: parallel Linear layers and embeddings, and DotProductAttention, with each process's part.

Axes are Megatron's: (tokens, batch, features) and (tokens, batch, heads, head_dim). With sequence parallelism the
tokens of a column-parallel layer's input and of a row-parallel layer's output are split over the group;
`DumpReader.join` joins the parts.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor, nn

from instruments.tensor_dump.config import ATTENTION, EMBEDDING, LINEAR
from instruments.tensor_dump.modules import hook_attention, hook_layer
from instruments.tensor_dump.parts import Part, layer_of
from instruments.tensor_dump.recorder import Watched

_TOKENS, _HEADS = 0, 2
# Coordinate → group name in the functions of parallel_state.
_COORDINATES = {
    "tp": "tensor_model_parallel", "pp": "pipeline_model_parallel", "cp": "context_parallel", "dp": "data_parallel",
    "ep": "expert_model_parallel",
}  # fmt: skip


def find_megatron(root: nn.Module, prefix: str) -> Iterator[Watched]:
    """Every module of these kinds, its layer counted over all pipeline stages."""
    numbers: dict[str, int] = {}
    for name, module in root.named_modules(prefix=prefix):
        if isinstance(number := getattr(module, "layer_number", None), int):
            numbers[name] = number - 1
        layer = _layer(name, numbers)
        if isinstance(module, DotProductAttention):
            yield Watched(name, module, ATTENTION, layer, hook_attention, partial(_part_of_heads, module))
        elif isinstance(module, ColumnParallelLinear | RowParallelLinear):
            hook = partial(hook_layer, given_weight=_given_weight)
            yield Watched(name, module, LINEAR, layer, hook, partial(_part_of_linear, module))
        elif isinstance(module, VocabParallelEmbedding):
            yield Watched(name, module, EMBEDDING, None, hook_layer, partial(_part_of_embedding, module))


def find_coordinates() -> dict[str, tuple[int, int]]:
    """This process's coordinate in each kind of parallelism; {} before Megatron has initialised them."""
    if not parallel_state.model_parallel_is_initialized():
        return {}
    ask = parallel_state
    return {
        name: (getattr(ask, f"get_{group}_rank")(), getattr(ask, f"get_{group}_world_size")())
        for name, group in _COORDINATES.items()
    }


def _part_of_heads(module: Any, name: str, tensor: Tensor) -> Part:  # noqa: ANN401 - a module of Megatron
    """Heads are split over processes; with fewer groups than processes, several hold the same group."""
    if name == "output":
        return _cut(tensor, -1)
    (rank, size), config = _group(), module.config
    groups = config.num_query_groups or config.num_attention_heads
    heads = config.num_attention_heads if name == "query" else groups
    shape, offset = list(tensor.shape), [0] * tensor.ndim
    shape[_HEADS], offset[_HEADS] = heads, rank * heads // size
    return Part(tuple(shape), tuple(offset), _TOKENS)


def _part_of_embedding(module: Any, name: str, tensor: Tensor) -> Part:  # noqa: ANN401
    """Each process holds some rows of the table; ids and output, (batch, tokens, features), are whole."""
    if name == "weight":
        return Part.of_axis(tensor, 0, *_group(), None)
    # Sequence parallelism: the output is (tokens, batch, features).
    scattered = name == "output" and getattr(module, "reduce_scatter_embeddings", False)
    return _cut(tensor, _TOKENS) if scattered else Part.whole(tensor, 1)


def _part_of_linear(module: Any, name: str, tensor: Tensor) -> Part:  # noqa: ANN401
    """A weight split along its outputs (column-parallel) or its inputs (row-parallel)."""
    by_column = isinstance(module, ColumnParallelLinear)
    # Gate and up may be one layer: each process holds its share of both.
    pieces = int(getattr(getattr(module, "weight", None), "partition_stride", 1))
    if name == "weight":
        return Part.of_axis(tensor, 0 if by_column else 1, *_group(), None, pieces)
    if name == "input" and not by_column:
        return _cut(tensor, -1, pieces) if module.input_is_parallel else Part.whole(tensor, _TOKENS)
    # Column-parallel outputs may be gathered, by the layer or by the call.
    if name == "output" and by_column and tensor.shape[-1] != module.output_size:
        return _cut(tensor, -1, pieces)
    tokens_are_split = module.sequence_parallel and by_column == (name == "input")
    return _cut(tensor, _TOKENS) if tokens_are_split else Part.whole(tensor, _TOKENS)


def _given_weight(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    return args[1] if len(args) > 1 else kwargs.get("weight")


def _cut(tensor: Tensor, axis: int, pieces: int = 1) -> Part:
    return Part.of_axis(tensor, axis % tensor.ndim, *_group(), _TOKENS, pieces)


def _group() -> tuple[int, int]:
    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()


def _layer(name: str, numbers: dict[str, int]) -> int | None:
    """The layer number of the closest enclosing module that has one; else the number in the name."""
    around = name
    while around:
        if around in numbers:
            return numbers[around]
        around = around.rpartition(".")[0]
    return layer_of(name)
