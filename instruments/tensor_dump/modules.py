"""Hooks on layers with a weight, attention and its kernels, and fused experts."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.hooks import RemovableHandle

from instruments.hooks import OwnHook, look_inside
from instruments.tensor_dump.capture import Part, Watched, layer_of, take_local
from instruments.tensor_dump.config import ATTENTION, CONVOLUTION, EMBEDDING, EXPERTS, LINEAR, TENSORS
from instruments.tensor_dump.recorder import Call, Recorder
from instruments.tensors import is_sharded
from instruments.transformers_layers import ProductFinder, conv1d_kind, fused_parameters

TENSOR_PARALLEL = "tp"


def find_known(root: nn.Module, prefix: str) -> Iterator[Watched]:
    """Linear layers (also of bitsandbytes and PEFT), Conv1D, convolutions, embeddings, attention, fused experts."""
    kinds = (
        (nn.Linear, LINEAR),
        (conv1d_kind(), LINEAR),
        (_ConvNd, CONVOLUTION),
        (nn.Embedding | nn.EmbeddingBag, EMBEDDING),
    )
    for name, module in root.named_modules(prefix=prefix):
        for kind, layer_type in kinds:
            if isinstance(module, kind):
                watch = watch_linear if kind is nn.Linear else watch_weighted
                yield Watched(name, module, layer_type, layer_of(name), watch)
        forward = getattr(type(module), "forward", None)  # a ScriptModule has none
        code = getattr(inspect.unwrap(forward), "__code__", None) if forward is not None else None
        if code is not None and _LOOK_UP in code.co_names:
            yield Watched(name, module, ATTENTION, layer_of(name), watch_attention)
        for own in fused_parameters(module):
            yield Watched(f"{name}.{own}", module, EXPERTS, layer_of(name), watch_experts, parameter=own)


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
    *,
    input_part: Callable[[Tensor], Part],
    output_part: Callable[[Tensor], Part],
    weight_part: Callable[[Tensor], Part] = lambda weight: take_local(weight)[1],
    given_weight: Callable[[tuple[Any, ...], dict[str, Any]], Tensor | None] = lambda _args, _kwargs: None,
) -> list[RemovableHandle]:
    """Hooks that pass a layer's input (its first argument), weight, output and gradients to the recorder.

    Each comes with the part that this process holds. The weight is the module's, unless a call has been given another.
    """
    module: Any = watched.module

    def begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        inputs: Tensor = args[0] if args else next(iter(kwargs.values()))
        if not _is_plain(inputs):
            recorder.leave_out(watched, TENSORS[watched.layer_type], f"the input is {_describe(inputs)}")
            return None
        if (call := recorder.begin_call(watched, inputs)) is None:
            return None
        recorder.take(call, "input", inputs, input_part(inputs))
        if is_parametrized(module, "weight"):
            recorder.leave_out(watched, ["weight", "grad_weight"], "a parametrization computes it at every reading")
        else:
            given = given_weight(args, kwargs)
            weight = module.weight if given is None else given
            recorder.take_weight(call, weight, weight_part(weight))
        return call

    def end(call: Call, output: Any) -> None:  # noqa: ANN401 - any output of a module
        if not _is_plain(output):
            recorder.leave_out(watched, ["output", "grad_output"], f"the output is {_describe(output)}")
            return
        part = output_part(output)
        recorder.take(call, "output", output, part)
        recorder.take_gradient(call, "grad_output", output, part)

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


def watch_weighted(watched: Watched, recorder: Recorder) -> list[RemovableHandle]:
    """A Conv1D, whose weight is (inputs, outputs), a convolution or an embedding; inputs and outputs are whole."""

    def part(tensor: Tensor, features: int) -> Part:
        """Tokens are the last axis before the features; ids have no feature axis."""
        axis = tensor.ndim - 1 - features
        return Part.whole(tensor, axis if watched.layer_type != CONVOLUTION and axis >= 0 else None)

    return hook_layer(
        watched,
        recorder,
        input_part=lambda inputs: part(inputs, 0 if watched.layer_type == EMBEDDING else 1),
        output_part=lambda output: part(output, 1),
    )


def watch_linear(watched: Watched, recorder: Recorder) -> list[RemovableHandle]:
    """A Linear, whose weight may be sharded."""
    module: Any = watched.module

    def part_of(tensor: Tensor, width: int, axis: int) -> Part:
        """Part of an output (`axis` 0 of the weight) or an input (1), whose features may be sharded."""
        # The second-last axis counts tokens in (batch, tokens, features) and in (tokens, features).
        token_axis = tensor.ndim - 2 if tensor.ndim >= 2 else None
        if is_parametrized(module, "weight") or not is_sharded(module.weight) or tensor.shape[-1] == width:
            return Part.whole(tensor, token_axis)
        begin = take_local(module.weight)[1].offset[axis]
        return Part((*tensor.shape[:-1], width), (*[0] * (tensor.ndim - 1), begin), token_axis)

    return hook_layer(
        watched,
        recorder,
        input_part=lambda inputs: part_of(inputs, module.in_features, 1),
        output_part=lambda output: part_of(output, module.out_features, 0),
    )


Kernel = Callable[..., Any]
_LOOK_UP = "get_interface"

_watchers: dict[nn.Module, tuple[Watched, Recorder]] = {}
_original: list[Kernel] = []


def watch_attention(watched: Watched, recorder: Recorder) -> list[Any]:
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
        tensors = {"query": query, "key": key, "value": value}
        call = take_heads(watched, recorder, tensors, partial(_part_of_heads, module))
    result = kernel(module, query, key, value, *args, **kwargs)
    if call is not None:
        recorder.take(call, "output", result[0], _part_of_heads(module, "query", result[0], axis=2))
    return result


def take_heads(
    watched: Watched, recorder: Recorder, tensors: dict[str, Tensor], part_of: Callable[[str, Tensor], Part]
) -> Call | None:
    """Keep query, key and value of a call, and their gradients; `part_of` says what this process holds of each."""
    call = recorder.begin_call(watched, tensors["query"])
    if call is None:
        return None
    for name, tensor in tensors.items():
        part = part_of(name, tensor)
        recorder.take(call, name, tensor, part)
        recorder.take_gradient(call, f"grad_{name}", tensor, part)
    return call


def hook_attention(
    watched: Watched, recorder: Recorder, part_of: Callable[[str, Tensor], Part], output_part: Callable[[Tensor], Part]
) -> list[RemovableHandle]:
    """Hooks on a module whose first three arguments are query, key and value."""

    def begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        named = [kwargs.get(name, kwargs.get(f"{name}_layer")) for name in ("query", "key", "value")]
        given = [*args[:3], *named[len(args[:3]) :]]
        return take_heads(watched, recorder, dict(zip(("query", "key", "value"), given, strict=True)), part_of)

    return _hook_calls(
        watched.module, begin, lambda call, output: recorder.take(call, "output", output, output_part(output))
    )


def _part_of_heads(module: nn.Module, name: str, tensor: Tensor, axis: int = 1) -> Part:
    """Part of (batch, heads, tokens, head_dim); of the output (batch, tokens, heads, head_dim) with `axis` 2."""
    config = getattr(module, "config", None)
    heads = getattr(config, "num_attention_heads" if name == "query" else "num_key_value_heads", None)
    place = find_mesh_coordinates([module]).get(TENSOR_PARALLEL)
    if place is None or heads is None or tensor.shape[axis] == heads:
        return Part.whole(tensor, 3 - axis)
    return Part.of_axis(tensor, axis, *place, 3 - axis)


def watch_experts(watched: Watched, recorder: Recorder) -> list[RemovableHandle]:
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
        recorder.take(call, name, tensor, Part.whole(tensor, None))
    recorder.take_weight_gradient(call, finder.weight, Part.whole(finder.weight, None))
    output = func(*args, **kwargs)
    rows = output.flatten(1)
    recorder.take(call, "output", rows, Part.whole(rows, None))

    def take_gradient(gradient: Tensor) -> None:
        rows = gradient.flatten(1)
        recorder.take_found_gradient(call, "grad_output", rows, Part.whole(rows, None))

    if output.requires_grad:
        output.register_hook(take_gradient)
    return output
