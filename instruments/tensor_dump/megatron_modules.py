"""megatron-core: ColumnParallelLinear, RowParallelLinear and DotProductAttention, with what each process holds.

Axes are those of Megatron: (tokens, batch, features) and (tokens, batch, heads, head_dim). With sequence parallelism
the tokens of a column-parallel layer's input and of a row-parallel layer's output are spread over the group; each
process gives its own part, and `DumpReader.join` puts them together.
"""

from collections.abc import Iterator
from typing import Any

from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from instruments.tensor_dump.capture import Part, Watched, layer_of
from instruments.tensor_dump.config import ATTENTION, LINEAR
from instruments.tensor_dump.recorder import Call, Recorder

_TOKENS, _HEADS = 0, 2
_KINDS = {ColumnParallelLinear: LINEAR, RowParallelLinear: LINEAR, DotProductAttention: ATTENTION}
# Coordinate → functions of parallel_state that tell this process's place and the size of its group.
_COORDINATES = {
    "tp": ("get_tensor_model_parallel_rank", "get_tensor_model_parallel_world_size"),
    "pp": ("get_pipeline_model_parallel_rank", "get_pipeline_model_parallel_world_size"),
    "cp": ("get_context_parallel_rank", "get_context_parallel_world_size"),
    "dp": ("get_data_parallel_rank", "get_data_parallel_world_size"),
    "ep": ("get_expert_model_parallel_rank", "get_expert_model_parallel_world_size"),
}


def find_megatron(root: nn.Module, prefix: str) -> Iterator[Watched]:
    """Every module of the three kinds, its layer counted over all stages of the pipeline."""
    numbers: dict[str, int] = {}
    for name, module in root.named_modules(prefix=prefix):
        if isinstance(number := getattr(module, "layer_number", None), int):
            numbers[name] = number - 1
        for kind, layer_type in _KINDS.items():
            if isinstance(module, kind):
                yield Watched(name, module, layer_type, _layer(name, numbers))


def is_megatron(module: nn.Module) -> bool:
    """Whether this adapter knows the module."""
    return isinstance(module, tuple(_KINDS))


def find_coordinates() -> dict[str, tuple[int, int]]:
    """This process's place in every kind of parallelism; nothing before Megatron has set them up."""
    if not parallel_state.model_parallel_is_initialized():
        return {}
    return {
        name: (getattr(parallel_state, rank)(), getattr(parallel_state, size)())
        for name, (rank, size) in _COORDINATES.items()
    }


def watch_megatron(watched: Watched, recorder: Recorder) -> list[RemovableHandle]:
    """The hooks of a module."""
    if isinstance(watched.module, DotProductAttention):
        return [watched.module.register_forward_pre_hook(_AttentionHook(watched, recorder), with_kwargs=True)]
    hook = _LinearHook(watched, recorder)
    return [
        watched.module.register_forward_pre_hook(hook.before, with_kwargs=True),
        watched.module.register_forward_hook(hook.after),
    ]


class _AttentionHook:
    def __init__(self, watched: Watched, recorder: Recorder) -> None:
        self._watched, self._recorder = watched, recorder
        config: Any = watched.module.config
        groups = config.num_query_groups or config.num_attention_heads
        self._heads = {"query": config.num_attention_heads, "key": groups, "value": groups}

    def __call__(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = self._recorder.begin_call(self._watched, args[0] if args else kwargs["query"])
        if call is None:
            return
        for position, (name, heads) in enumerate(self._heads.items()):
            tensor = args[position] if position < len(args) else kwargs[name]
            part = _part_of_heads(tensor, heads)
            self._recorder.take(call, name, tensor, part)
            self._recorder.take_gradient(call, f"grad_{name}", tensor, part)


def _part_of_heads(tensor: Tensor, heads: int) -> Part:
    """The heads that a process has; where there are fewer groups than processes, several have the same."""
    rank, size = _group()
    shape, offset = list(tensor.shape), [0] * tensor.ndim
    shape[_HEADS], offset[_HEADS] = heads, rank * heads // size
    return Part(tuple(shape), tuple(offset), _TOKENS)


class _LinearHook:
    """Of a column-parallel layer, whose weight is cut along its outputs, or a row-parallel one: along its inputs."""

    def __init__(self, watched: Watched, recorder: Recorder) -> None:
        self._watched, self._recorder = watched, recorder
        self._by_column = isinstance(watched.module, ColumnParallelLinear)
        self._calls: list[Call] = []
        # Gate and up are one layer: each process has its share of both.
        self._pieces = int(getattr(getattr(watched.module, "weight", None), "partition_stride", 1))

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._calls.clear()
        inputs: Tensor = args[0] if args else kwargs["input_"]
        call = self._recorder.begin_call(self._watched, inputs)
        if call is None:
            return
        self._calls.append(call)
        given = args[1] if len(args) > 1 else kwargs.get("weight")
        weight: Tensor = module.weight if given is None else given  # type: ignore[assignment]
        self._recorder.take(call, "input", inputs, self._input_part(module, inputs))
        axis = 0 if self._by_column else 1
        self._recorder.take(call, "weight", weight, Part.of_axis(weight, axis, *_group(), None, self._pieces))

    def after(self, module: nn.Module, _args: tuple[Any, ...], output: tuple[Tensor, Tensor | None]) -> None:
        if self._calls:
            tensor = output[0]
            self._recorder.take_gradient(self._calls.pop(), "grad_output", tensor, self._output_part(module, tensor))

    def _input_part(self, module: nn.Module, inputs: Tensor) -> Part:
        if not self._by_column:
            split = module.input_is_parallel
            return _cut(inputs, -1, self._pieces) if split else Part.whole(inputs, _TOKENS)
        return _cut(inputs, _TOKENS) if module.sequence_parallel else Part.whole(inputs, _TOKENS)

    def _output_part(self, module: nn.Module, output: Tensor) -> Part:
        if self._by_column:
            # Whole where it was gathered, whether the layer or the call asked for that.
            cut = output.shape[-1] != module.output_size
            return _cut(output, -1, self._pieces) if cut else Part.whole(output, _TOKENS)
        return _cut(output, _TOKENS) if module.sequence_parallel else Part.whole(output, _TOKENS)


def _cut(tensor: Tensor, axis: int, pieces: int = 1) -> Part:
    return Part.of_axis(tensor, axis % tensor.ndim, *_group(), _TOKENS, pieces)


def _group() -> tuple[int, int]:
    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()


def _layer(name: str, numbers: dict[str, int]) -> int | None:
    """Of the closest module around it that counts itself; by its name where none does."""
    around = name
    while around:
        if around in numbers:
            return numbers[around]
        around = around.rpartition(".")[0]
    return layer_of(name)
