"""Hooks on layers with a weight, attention and its kernels, and fused experts; also on TransformerEngine's modules."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.hooks import RemovableHandle

from instruments.hooks import OwnHook, look_inside
from instruments.tensor_dump.config import ATTENTION, CONVOLUTION, EMBEDDING, EXPERTS, LINEAR, NORM_LINEAR, TENSORS
from instruments.tensor_dump.parts import Part, layer_of, part_of_weight
from instruments.tensor_dump.recorder import Call, Recorder, Watched
from instruments.tensors import is_sharded
from instruments.transformers_layers import ProductFinder, conv1d_kind, fused_parameters

TENSOR_PARALLEL = "tp"


def find_known(root: nn.Module, prefix: str) -> Iterator[Watched]:
    """Linear layers (also of bitsandbytes and PEFT), Conv1D, convolutions, embeddings, attention, fused experts."""
    kinds: tuple[tuple[Any, str, Any], ...] = (
        (nn.Linear, LINEAR, _part_of_linear),
        (conv1d_kind(), LINEAR, _part_of_whole),
        (_ConvNd, CONVOLUTION, lambda _module, name, tensor: _without_tokens(name, tensor)),
        (nn.Embedding | nn.EmbeddingBag, EMBEDDING, _part_of_embedding),
    )
    for name, module in root.named_modules(prefix=prefix):
        layer = layer_of(name)
        for kind, layer_type, part_of in kinds:
            if isinstance(module, kind):
                yield Watched(name, module, layer_type, layer, hook_layer, partial(part_of, module))
        forward = getattr(type(module), "forward", None)  # a ScriptModule has none
        code = getattr(inspect.unwrap(forward), "__code__", None) if forward is not None else None
        if code is not None and _LOOK_UP in code.co_names:
            yield Watched(name, module, ATTENTION, layer, hook_kernel, partial(_part_of_heads, module))
        for own in fused_parameters(module):
            yield Watched(f"{name}.{own}", module, EXPERTS, layer, hook_experts, _without_tokens, parameter=own)


def _without_tokens(name: str, tensor: Tensor) -> Part:
    return part_of_weight(tensor) if name == "weight" else Part.whole(tensor, None)


def _part_of_whole(_module: nn.Module, name: str, tensor: Tensor) -> Part:
    """Inputs and outputs are whole; the axis before the features, the second-last one, counts tokens."""
    if name == "weight":
        return part_of_weight(tensor)
    return Part.whole(tensor, tensor.ndim - 2 if tensor.ndim >= 2 else None)


def _part_of_embedding(_module: nn.Module, name: str, tensor: Tensor) -> Part:
    """Ids have no feature axis."""
    if name == "weight":
        return part_of_weight(tensor)
    axis = tensor.ndim - (1 if name == "input" else 2)
    return Part.whole(tensor, axis if axis >= 0 else None)


def _part_of_linear(module: Any, name: str, tensor: Tensor) -> Part:  # noqa: ANN401 - a Linear
    """The weight may be sharded, and with it the features of the input or the output."""
    if name == "weight":
        return part_of_weight(tensor)
    width, axis = (module.in_features, 1) if name == "input" else (module.out_features, 0)
    if is_parametrized(module, "weight") or not is_sharded(module.weight) or tensor.shape[-1] == width:
        return _part_of_whole(module, name, tensor)
    begin = part_of_weight(module.weight).offset[axis]
    return Part((*tensor.shape[:-1], width), (*[0] * (tensor.ndim - 1), begin), tensor.ndim - 2)


def _part_of_heads(module: nn.Module, name: str, tensor: Tensor) -> Part:
    """Part of (batch, heads, tokens, head_dim); of the output (batch, tokens, heads, head_dim)."""
    axis, config = 2 if name == "output" else 1, getattr(module, "config", None)
    heads = getattr(config, "num_attention_heads" if name in {"query", "output"} else "num_key_value_heads", None)
    place = find_mesh_coordinates([module]).get(TENSOR_PARALLEL)
    if place is None or heads is None or tensor.shape[axis] == heads:
        return Part.whole(tensor, 3 - axis)
    return Part.of_axis(tensor, axis, *place, 3 - axis)


def find_mesh_coordinates(roots: Sequence[nn.Module]) -> dict[str, tuple[int, int]]:
    """Coordinate of this process and size of every mesh axis over which weights are sharded; {} if none are."""
    return {
        name: (mesh.get_local_rank(axis), mesh.size(axis))
        for root in roots
        for weight in root.parameters()
        if is_sharded(weight)
        for mesh in [weight.device_mesh]
        for axis, name in enumerate(mesh.mesh_dim_names or (TENSOR_PARALLEL,))
    }


def hook_layer(
    watched: Watched,
    recorder: Recorder,
    given_weight: Callable[[tuple[Any, ...], dict[str, Any]], Tensor | None] = lambda _args, _kwargs: None,
) -> list[RemovableHandle]:
    """Hooks that pass a layer's input (its first argument), weight, output and gradients to the recorder.

    The weight is the module's, unless a call has been given another.
    """
    module: Any = watched.module

    def begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        inputs: Tensor = args[0] if args else next(iter(kwargs.values()))
        if not _is_plain(inputs):
            recorder.leave_out(watched, TENSORS[watched.layer_type], f"the input is {_describe(inputs)}")
            return None
        if (call := recorder.begin_call(watched, inputs)) is None:
            return None
        recorder.take(call, "input", inputs)
        if is_parametrized(module, "weight"):
            recorder.leave_out(watched, ["weight", "grad_weight"], "a parametrization computes it at every reading")
        else:
            given = given_weight(args, kwargs)
            weight = module.weight if given is None else given
            recorder.take(call, "weight", weight)
            recorder.take_weight_gradient(call, weight)
        return call

    def end(call: Call, output: Any) -> None:  # noqa: ANN401 - any output of a module
        if not _is_plain(output):
            recorder.leave_out(watched, ["output", "grad_output"], f"the output is {_describe(output)}")
            return
        recorder.take(call, "output", output)
        recorder.take_gradient(call, "grad_output", output)

    return _hook_calls(module, begin, end)


def _is_plain(value: object) -> bool:
    return isinstance(value, Tensor) and not value.is_nested


def _describe(value: object) -> str:
    return "a nested tensor" if isinstance(value, Tensor) and value.is_nested else f"of type {type(value).__name__}"


def _hook_calls(
    module: nn.Module, begin: Callable[[tuple[Any, ...], dict[str, Any]], Call | None], end: Callable[[Call, Any], None]
) -> list[RemovableHandle]:
    """Hooks around every call of a module; `end` also receives its output, the first element of a tuple."""
    calls: list[Call] = []  # the running call: one, or none

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls[:] = filter(None, [begin(args, kwargs)])

    def after(_module: nn.Module, _args: tuple[Any, ...], result: Any) -> None:  # noqa: ANN401
        if calls:  # a tuple also has the bias, the norm's output or the attention weights
            end(calls.pop(), result[0] if isinstance(result, tuple) and result else result)

    return [
        module.register_forward_pre_hook(OwnHook(before), with_kwargs=True),
        module.register_forward_hook(OwnHook(after)),
    ]


Kernel = Callable[..., Any]
_HEADS = ("query", "key", "value")
_LOOK_UP = "get_interface"

_watchers: dict[nn.Module, tuple[Watched, Recorder]] = {}
_original: list[Kernel] = []


def hook_kernel(watched: Watched, recorder: Recorder) -> list[Any]:
    """Capture the arguments of its kernel; AttentionInterface is restored when no module is watched."""
    return [_watching(watched, recorder)]


@contextmanager
def _watching(watched: Watched, recorder: Recorder) -> Iterator[None]:
    from transformers import AttentionInterface  # noqa: PLC0415 - other models need no transformers

    if not _watchers:
        _original.append(getattr(AttentionInterface, _LOOK_UP))
        setattr(AttentionInterface, _LOOK_UP, lambda *asked: partial(_run_watched, _original[0](*asked)))
    _watchers[watched.module] = (watched, recorder)
    try:
        yield
    finally:
        del _watchers[watched.module]
        if not _watchers:
            setattr(AttentionInterface, _LOOK_UP, _original.pop())


def _run_watched(
    kernel: Kernel,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,  # noqa: ANN401 - depends on the kernel
    **kwargs: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    call = None
    if module in _watchers:
        watched, recorder = _watchers[module]
        call = _take_heads(watched, recorder, query, key, value)
    result = kernel(module, query, key, value, *args, **kwargs)
    if call is not None:
        recorder.take(call, "output", result[0])
    return result


def _take_heads(watched: Watched, recorder: Recorder, *heads: Tensor) -> Call | None:
    """Keep query, key and value of a call, and their gradients."""
    call = recorder.begin_call(watched, heads[0])
    if call is not None:
        for name, tensor in zip(_HEADS, heads, strict=True):
            recorder.take(call, name, tensor)
            recorder.take_gradient(call, f"grad_{name}", tensor)
    return call


def hook_attention(watched: Watched, recorder: Recorder) -> list[RemovableHandle]:
    """Hooks on a module whose first three arguments are query, key and value."""

    def begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        named: list[Any] = [kwargs.get(name, kwargs.get(f"{name}_layer")) for name in _HEADS]
        return _take_heads(watched, recorder, *args[:3], *named[len(args[:3]) :])

    return _hook_calls(watched.module, begin, lambda call, output: recorder.take(call, "output", output))


def hook_experts(watched: Watched, recorder: Recorder) -> list[RemovableHandle]:
    """Hooks that find the products of one parameter during each call of its module."""

    def begin(*args: Any, **kwargs: Any) -> Kernel:  # noqa: ANN401 - the module's arguments
        chosen: Tensor = args[1] if len(args) > 1 else kwargs["top_k_index"]
        return partial(_run_product, watched, recorder, ProductFinder(watched.module, watched.parameter, chosen))

    return look_inside(watched.module, begin)


def _run_product(
    watched: Watched,
    recorder: Recorder,
    finder: ProductFinder,
    func: Kernel,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:  # noqa: ANN401 - any result of the function
    found = finder.find(func, args, kwargs)
    call = recorder.begin_call(watched, found["input"]) if found else None
    if call is None:
        return func(*args, **kwargs)
    for name, tensor in found.items():
        recorder.take(call, name, tensor)
    recorder.take_weight_gradient(call, finder.weight)
    output = func(*args, **kwargs)
    recorder.take(call, "output", output.flatten(1))
    if output.requires_grad:
        output.register_hook(lambda gradient: recorder.take_found_gradient(call, "grad_output", gradient.flatten(1)))
    return output


# TransformerEngine, also inside Megatron: its classes are found by name, without an import; Megatron's
# TEColumnParallelLinear, TEDotProductAttention ... are subclasses. The input of a LayerNormLinear is that of its norm:
# the kernel does not expose the norm's output.
_ENGINE_KINDS = {"Linear": LINEAR, "LayerNormLinear": NORM_LINEAR, "DotProductAttention": ATTENTION}


def find_transformer_engine(root: nn.Module, prefix: str) -> Iterator[Watched]:
    """Every module of one of the three classes or a subclass."""
    for name, module in root.named_modules(prefix=prefix):
        own = (kind for kind in type(module).__mro__ if kind.__module__.startswith("transformer_engine."))
        layer_type = next((_ENGINE_KINDS[kind.__name__] for kind in own if kind.__name__ in _ENGINE_KINDS), None)
        if layer_type is not None:
            number = getattr(module, "layer_number", None)  # Megatron's, counted over all pipeline stages
            layer = number - 1 if isinstance(number, int) else layer_of(name)
            attention = layer_type == ATTENTION
            hook, part_of = (hook_attention, _engine_heads) if attention else (hook_layer, _engine_linear)
            yield Watched(name, module, layer_type, layer, hook, partial(part_of, module))


def _engine_linear(module: Any, name: str, tensor: Tensor) -> Part:  # noqa: ANN401 - a module of TransformerEngine
    """A layer split along its outputs (parallel_mode column) or inputs (row), or not split.

    The features of the side that is split are parts; on the other side, the tokens may be.
    """
    mode, place = module.parallel_mode, _engine_group(module)
    if name == "weight":
        axis = {"column": 0, "row": 1}.get(mode)
        return Part.whole(tensor, None) if axis is None else Part.of_axis(tensor, axis, *place, None)
    tokens = 0 if tensor.ndim == 3 else None  # the axis in (tokens, batch, features)
    if mode == ("row" if name == "input" else "column"):
        return Part.of_axis(tensor, tensor.ndim - 1, *place, tokens)
    if mode in {"column", "row"} and module.sequence_parallel:
        return Part.of_axis(tensor, 0, *place, tokens)
    return Part.whole(tensor, tokens)


def _engine_heads(module: Any, name: str, tensor: Tensor) -> Part:  # noqa: ANN401
    """Heads are the second-last axis; tokens are the first axis in sbhd and thd, the second in bshd."""
    tokens = 1 if getattr(module, "qkv_format", "sbhd") == "bshd" else 0
    return Part.of_axis(tensor, tensor.ndim - (1 if name == "output" else 2), *_engine_group(module), tokens)


def _engine_group(module: Any) -> tuple[int, int]:  # noqa: ANN401
    """This process's rank in the tensor-parallel group, and the group's size."""
    size = getattr(module, "tp_size", 1)
    return (torch.distributed.get_rank(module.tp_group) if size > 1 else 0), size
