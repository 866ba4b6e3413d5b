"""Hooks on the layers that are known: Linear layers and attention, experts of transformers, megatron-core."""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface

from instruments.tensor_dump.config import ATTENTION, BACKWARD, EXPERTS, LINEAR
from instruments.tensor_dump.recorder import Call, Recorder
from instruments.tensor_dump.watched import Part, Watched, layer_of

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


def find_linears(root: nn.Module, prefix: str) -> Iterator[Watched]:
    """Every nn.Linear, those of bitsandbytes and PEFT among them."""
    for name, module in root.named_modules(prefix=prefix):
        if isinstance(module, nn.Linear):
            yield Watched(name, module, LINEAR, layer_of(name))


def watch_linear(watched: Watched, recorder: Recorder) -> list[RemovableHandle]:
    """Hooks that give the input and the weight before the layer runs, and the gradient of what it gives."""
    calls: list[Call] = []  # of the layer that is running: one, or none

    def before(module: nn.Linear, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.clear()
        inputs: Tensor = args[0] if args else kwargs["input"]
        call = recorder.begin_call(watched, inputs)
        if call is None:
            return
        calls.append(call)
        recorder.take(call, "input", inputs, part_of_features(inputs, module, 1, token_axis(inputs)))
        recorder.take(call, "weight", *take_local(module.weight))

    def after(module: nn.Linear, _args: tuple[Any, ...], output: Tensor) -> None:
        if calls:
            part = part_of_features(output, module, 0, token_axis(output))
            recorder.take_gradient(calls.pop(), "grad_output", output, part)

    module = watched.module
    return [module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)]


def token_axis(tensor: Tensor) -> int | None:
    """The axis before the last, of (batch, tokens, features) and (tokens, features) alike."""
    return tensor.ndim - 2 if tensor.ndim >= 2 else None


Kernel = Callable[..., Any]
_LOOK_UP = "get_interface"

_watchers: dict[nn.Module, tuple[Watched, Recorder]] = {}
_original: list[Kernel] = []


def find_attentions(root: nn.Module, prefix: str) -> Iterator[Watched]:
    """Every module whose forward pass asks the interface for its kernel."""
    for name, module in root.named_modules(prefix=prefix):
        if _asks_for_kernel(type(module)):
            yield Watched(name, module, ATTENTION, layer_of(name))


def _asks_for_kernel(kind: type[nn.Module]) -> bool:
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return code is not None and _LOOK_UP in code.co_names


class AttentionWatch:
    """A watched attention layer, until `remove` is called."""

    def __init__(self, watched: Watched, recorder: Recorder) -> None:
        """Look at its kernel's arguments from now on."""
        if not _watchers:
            _original.append(getattr(AttentionInterface, _LOOK_UP))
            setattr(AttentionInterface, _LOOK_UP, _give_watched)
        self._module = watched.module
        _watchers[self._module] = (watched, recorder)

    def remove(self) -> None:
        """Leave the interface as it was, once nothing is watched."""
        if _watchers.pop(self._module, None) is not None and not _watchers:
            setattr(AttentionInterface, _LOOK_UP, _original.pop())


def _give_watched(interface: AttentionInterface, name: str, default: Kernel) -> Kernel:
    return partial(_run_watched, _original[0](interface, name, default))


def _run_watched(
    kernel: Kernel,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,  # noqa: ANN401 - what a kernel takes is its own affair
    **kwargs: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    watched, recorder = _watchers.get(module, (None, None))
    call = recorder.begin_call(watched, query) if watched and recorder else None
    if call and recorder:
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            part = part_of_heads(tensor, module, name)
            recorder.take(call, name, tensor, part)
            recorder.take_gradient(call, f"grad_{name}", tensor, part)
    return kernel(module, query, key, value, *args, **kwargs)


_GROUPED = {
    getattr(place, name)
    for place, name in ((torch.nn.functional, "grouped_mm"), (torch, "_grouped_mm"))
    if hasattr(place, name)
}


def find_experts(root: nn.Module, prefix: str) -> Iterator[Watched]:
    """Every fused parameter of modules that transformers gives a choice of experts implementations."""
    for name, module in root.named_modules(prefix=prefix):
        if hasattr(type(module), "_apply_gate") and hasattr(module, "is_transposed"):
            for own in _fused(module):
                yield Watched(f"{name}.{own}", module, EXPERTS, layer_of(name), parameter=own)


def _fused(module: nn.Module) -> list[str]:
    return [name for name, parameter in module.named_parameters(recurse=False) if parameter.ndim == 3]


def watch_experts(watched: Watched, recorder: Recorder) -> list[RemovableHandle]:
    """Hooks that look at the products of one parameter, from the beginning of its module to its end."""
    running: list[_Products] = []

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        chosen: Tensor = args[1] if len(args) > 1 else kwargs["top_k_index"]
        running.append(_Products(watched, recorder, chosen))
        running[-1].__enter__()

    def after(_module: nn.Module, _args: tuple[Any, ...], _output: object) -> None:
        if running:
            running.pop().__exit__(None, None, None)

    module = watched.module
    return [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, always_call=True),  # recomputation ends in the middle, with an exception
    ]


class _Products(TorchFunctionMode):
    """Looks at the products of one parameter in one call of its module."""

    def __init__(self, watched: Watched, recorder: Recorder, chosen_TK: Tensor) -> None:
        super().__init__()
        self._watched, self._recorder, self._chosen_TK = watched, recorder, chosen_TK
        self._weight: Tensor = getattr(watched.module, watched.parameter)
        self._turn = _fused(watched.module).index(watched.parameter)  # among batched products, which copy the weight
        self._batched = 0

    def __torch_function__(
        self, func: Callable[..., Any], _types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # noqa: ANN401 - whatever the function returns
        kwargs = kwargs or {}
        found = self._find(func, args, kwargs)
        call = self._recorder.begin_call(self._watched, found["input"]) if found else None
        if call is None:
            return func(*args, **kwargs)
        for name, tensor in found.items():
            self._recorder.take(call, name, tensor, Part.whole(tensor, None))
        output = func(*args, **kwargs)
        if output.requires_grad:
            output.register_hook(partial(self._take_gradient, call))
        return output

    def _find(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
        """What goes into a product of the parameter; nothing where it is something else."""
        if func is linear and self._holds(args[1]):
            rows, weight = args[:2]
            expert = (weight.storage_offset() - self._weight.storage_offset()) // self._weight.stride(0)
            return {"input": rows, "weight": weight, "expert": torch.full((len(rows),), expert, device=rows.device)}
        if func in _GROUPED and self._holds(args[1]):
            rows = torch.arange(len(args[0]), device=args[0].device)
            expert = torch.bucketize(rows, kwargs["offs"].long(), right=True)
            return {"input": args[0], "weight": self._weight, "expert": expert}
        if func is torch.bmm:
            self._batched += 1
            if self._batched == self._turn + 1:
                rows = args[0 if self._watched.module.is_transposed else 1]
                return {"input": rows.flatten(1), "weight": self._weight, "expert": self._chosen_TK.reshape(-1)}
        return {}

    def _holds(self, weight: Tensor) -> bool:
        return weight.untyped_storage().data_ptr() == self._weight.untyped_storage().data_ptr()

    def _take_gradient(self, call: Call, gradient: Tensor) -> None:
        rows = gradient.flatten(1)
        self._recorder.take(call, "grad_output", rows, Part.whole(rows, None), BACKWARD)


_MEGATRON_TOKENS, _MEGATRON_HEADS = 0, 2
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
    shape[_MEGATRON_HEADS], offset[_MEGATRON_HEADS] = heads, rank * heads // size
    return Part(tuple(shape), tuple(offset), _MEGATRON_TOKENS)


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
            return _cut(inputs, -1, self._pieces) if split else Part.whole(inputs, _MEGATRON_TOKENS)
        return _cut(inputs, _MEGATRON_TOKENS) if module.sequence_parallel else Part.whole(inputs, _MEGATRON_TOKENS)

    def _output_part(self, module: nn.Module, output: Tensor) -> Part:
        if self._by_column:
            # Whole where it was gathered, whether the layer or the call asked for that.
            cut = output.shape[-1] != module.output_size
            return _cut(output, -1, self._pieces) if cut else Part.whole(output, _MEGATRON_TOKENS)
        return _cut(output, _MEGATRON_TOKENS) if module.sequence_parallel else Part.whole(output, _MEGATRON_TOKENS)


def _cut(tensor: Tensor, axis: int, pieces: int = 1) -> Part:
    return Part.of_axis(tensor, axis % tensor.ndim, *_group(), _MEGATRON_TOKENS, pieces)


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
