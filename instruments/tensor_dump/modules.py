"""Hooks on layers with a weight, attention and its kernels, and fused experts."""

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.hooks import RemovableHandle

from instruments.hooks import OwnHook, look_inside
from instruments.tensor_dump.config import ATTENTION, CONVOLUTION, EMBEDDING, EXPERTS, LINEAR, TENSORS
from instruments.tensor_dump.index import Placement
from instruments.tensor_dump.recorder import Call, Recorder, Watched
from instruments.tensors import is_sharded
from instruments.transformers_layers import ProductFinder, conv1d_kind, fused_parameters

TENSOR_PARALLEL = "tp"


def layer_of(name: str) -> int | None:
    """The first number in a module's name: 3 for model.layers.3.mlp.experts.5.up_proj."""
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return int(found[1]) if found else None


def find_known(root: nn.Module) -> Iterator[Watched]:
    """Linear layers (also of bitsandbytes and PEFT), Conv1D, convolutions, embeddings, attention, fused experts."""
    kinds: tuple[tuple[Any, str, Any], ...] = (
        (nn.Linear, LINEAR, _place_of_linear),
        (conv1d_kind(), LINEAR, _place_of_whole),
        (_ConvNd, CONVOLUTION, lambda _module, name, tensor: _without_tokens(name, tensor)),
        (nn.Embedding | nn.EmbeddingBag, EMBEDDING, _place_of_embedding),
    )
    for name, module in root.named_modules():
        layer = layer_of(name)
        for kind, layer_type, place in kinds:
            if isinstance(module, kind):
                yield Watched(name, module, layer_type, layer, hook_layer, partial(place, module))
        forward = getattr(type(module), "forward", None)  # a ScriptModule has none
        code = getattr(inspect.unwrap(forward), "__code__", None) if forward is not None else None
        if code is not None and _LOOK_UP in code.co_names:
            yield Watched(name, module, ATTENTION, layer, hook_kernel, partial(_place_of_heads, module))
        for own in fused_parameters(module):
            yield Watched(f"{name}.{own}", module, EXPERTS, layer, hook_experts, _without_tokens, parameter=own)


def place_of_weight(weight: Tensor) -> Placement:
    """The place of this process's part of a weight, which may be sharded."""
    offset = [0] * weight.ndim
    if is_sharded(weight):
        for axis, placement in enumerate(weight.placements):
            if placement.is_shard():
                dim: int = placement.dim  # type: ignore[attr-defined]
                chunk = -(-weight.shape[dim] // weight.device_mesh.size(axis))
                offset[dim] = min(weight.device_mesh.get_local_rank(axis) * chunk, weight.shape[dim])
    return Placement(tuple(weight.shape), tuple(offset), None)


def _without_tokens(name: str, tensor: Tensor) -> Placement:
    return place_of_weight(tensor) if name == "weight" else Placement.whole(tensor.shape, None)


def _place_of_whole(_module: nn.Module, name: str, tensor: Tensor) -> Placement:
    """Inputs and outputs are whole; the axis before the features, the second-last one, counts tokens."""
    if name == "weight":
        return place_of_weight(tensor)
    return Placement.whole(tensor.shape, tensor.ndim - 2 if tensor.ndim >= 2 else None)


def _place_of_embedding(module: nn.Module, name: str, tensor: Tensor) -> Placement:
    """Ids have no feature axis."""
    if name == "input" and tensor.ndim:
        return Placement.whole(tensor.shape, tensor.ndim - 1)
    return _place_of_whole(module, name, tensor)


def _place_of_linear(module: Any, name: str, tensor: Tensor) -> Placement:  # noqa: ANN401 - a Linear
    """The weight may be sharded, and with it the features of the input or the output."""
    place = _place_of_whole(module, name, tensor)
    width, axis = (module.in_features, 1) if name == "input" else (module.out_features, 0)
    is_split = not is_parametrized(module, "weight") and is_sharded(module.weight) and tensor.shape[-1] != width
    if name == "weight" or not is_split:
        return place
    begin = place_of_weight(module.weight).offset[axis]
    return Placement((*tensor.shape[:-1], width), (*place.offset[:-1], begin), place.token_axis)


def _place_of_heads(module: nn.Module, name: str, tensor: Tensor) -> Placement:
    """Part of (batch, heads, tokens, head_dim); of the output (batch, tokens, heads, head_dim)."""
    axis, config = 2 if name == "output" else 1, getattr(module, "config", None)
    heads = getattr(config, "num_attention_heads" if name in {"query", "output"} else "num_key_value_heads", None)
    rank_and_size = find_mesh_coordinates(module).get(TENSOR_PARALLEL)
    if rank_and_size is None or heads is None or tensor.shape[axis] == heads:
        return Placement.whole(tensor.shape, 3 - axis)
    return Placement.of_axis(tensor.shape, axis, *rank_and_size, 3 - axis)


def find_mesh_coordinates(root: nn.Module) -> dict[str, tuple[int, int]]:
    """Coordinate of this process and size of every mesh axis over which weights are sharded; {} if none are."""
    return {
        name: (mesh.get_local_rank(axis), mesh.size(axis))
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
