"""Adapters for megatron-core: parallel Linear layers and embeddings, and DotProductAttention, with each process's part.

Axes are Megatron's: (tokens, batch, features) and (tokens, batch, heads, head_dim). With sequence parallelism the
tokens of a column-parallel layer's input and of a row-parallel layer's output are split over the group;
`DumpReader.join` joins the parts.
"""

from collections.abc import Iterator
from typing import Any

from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from instruments.tensor_dump.config import ATTENTION, EMBEDDING, LINEAR
from instruments.tensor_dump.modules import hook_attention, hook_layer
from instruments.tensor_dump.parts import Part, layer_of
from instruments.tensor_dump.recorder import Recorder, Watched

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
        if isinstance(module, DotProductAttention):
            yield Watched(name, module, ATTENTION, _layer(name, numbers), watch_attention)
        elif isinstance(module, ColumnParallelLinear | RowParallelLinear):
            yield Watched(name, module, LINEAR, _layer(name, numbers), watch_parallel_linear)
        elif isinstance(module, VocabParallelEmbedding):
            yield Watched(name, module, EMBEDDING, None, watch_parallel_embedding)


def find_coordinates() -> dict[str, tuple[int, int]]:
    """This process's coordinate in each kind of parallelism; {} before Megatron has initialised them."""
    if not parallel_state.model_parallel_is_initialized():
        return {}
    ask = parallel_state
    return {
        name: (getattr(ask, f"get_{group}_rank")(), getattr(ask, f"get_{group}_world_size")())
        for name, group in _COORDINATES.items()
    }


def watch_attention(watched: Watched, recorder: Recorder) -> list[RemovableHandle]:
    """Heads are split over processes; with fewer groups than processes, several hold the same group."""
    config: Any = watched.module.config
    groups = config.num_query_groups or config.num_attention_heads
    heads = {"query": config.num_attention_heads, "key": groups, "value": groups}

    def part_of(name: str, tensor: Tensor) -> Part:
        rank, size = _group()
        shape, offset = list(tensor.shape), [0] * tensor.ndim
        shape[_HEADS], offset[_HEADS] = heads[name], rank * heads[name] // size
        return Part(tuple(shape), tuple(offset), _TOKENS)

    return hook_attention(watched, recorder, part_of, lambda output: _cut(output, -1))


def watch_parallel_embedding(watched: Watched, recorder: Recorder) -> list[RemovableHandle]:
    """Each process holds some rows of the table; ids and output, (batch, tokens, features), are whole."""
    # Sequence parallelism: the output is (tokens, batch, features).
    scattered = getattr(watched.module, "reduce_scatter_embeddings", False)
    return hook_layer(
        watched,
        recorder,
        input_part=lambda ids: Part.whole(ids, 1),
        weight_part=lambda weight: Part.of_axis(weight, 0, *_group(), None),
        output_part=lambda output: _cut(output, _TOKENS) if scattered else Part.whole(output, 1),
    )


def watch_parallel_linear(watched: Watched, recorder: Recorder) -> list[RemovableHandle]:
    """A weight split along its outputs (column-parallel) or its inputs (row-parallel)."""
    module: Any = watched.module
    by_column = isinstance(module, ColumnParallelLinear)
    # Gate and up may be one layer: each process holds its share of both.
    pieces = int(getattr(getattr(module, "weight", None), "partition_stride", 1))

    def input_part(inputs: Tensor) -> Part:
        if by_column:
            return _cut(inputs, _TOKENS) if module.sequence_parallel else Part.whole(inputs, _TOKENS)
        return _cut(inputs, -1, pieces) if module.input_is_parallel else Part.whole(inputs, _TOKENS)

    def output_part(output: Tensor) -> Part:
        if by_column and output.shape[-1] != module.output_size:  # not gathered, by the layer or by the call
            return _cut(output, -1, pieces)
        sequence_parallel = not by_column and module.sequence_parallel
        return _cut(output, _TOKENS) if sequence_parallel else Part.whole(output, _TOKENS)

    return hook_layer(
        watched,
        recorder,
        input_part=input_part,
        output_part=output_part,
        weight_part=lambda weight: Part.of_axis(weight, 0 if by_column else 1, *_group(), None, pieces),
        given_weight=lambda args, kwargs: args[1] if len(args) > 1 else kwargs.get("weight"),
    )


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
