"""Hooks on layers with a weight, attention and its kernels, and fused experts; also of Megatron, found by name."""

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.hooks import RemovableHandle

from instruments.hooks import OwnHook, look_inside
from instruments.tensor_dump.config import (
    ATTENTION,
    BACKWARD,
    CONVOLUTION,
    EMBEDDING,
    EXPERTS,
    LINEAR,
    NORM_LINEAR,
    TENSORS,
)
from instruments.tensor_dump.recorder import Call, Recorder, Watched
from instruments.tensors import is_sharded
from instruments.transformers_layers import ProductFinder, conv1d_kind, fused_parameters


def layer_of(name: str) -> int | None:
    """The first number in a module's name: 3 for model.layers.3.mlp.experts.5.up_proj."""
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return int(found[1]) if found else None


# Kind of module → tensor → its axis that counts the tokens of a sequence. Attention has (batch, heads, tokens,
# head_dim), and (batch, tokens, heads, head_dim) as output.
_FEATURES_LAST = {"input": -2, "output": -2}
_HEADS = ("query", "key", "value")


def find_known(root: nn.Module) -> Iterator[Watched]:
    """Linear layers (also of bitsandbytes and PEFT), Conv1D, convolutions, embeddings, attention, fused experts."""
    kinds: tuple[tuple[Any, str, Mapping[str, int]], ...] = (
        (nn.Linear, LINEAR, _FEATURES_LAST),
        (conv1d_kind(), LINEAR, _FEATURES_LAST),
        (_ConvNd, CONVOLUTION, {}),
        (nn.Embedding | nn.EmbeddingBag, EMBEDDING, {"input": -1, "output": -2}),
    )
    for name, module in root.named_modules():
        layer = layer_of(name)
        for kind, layer_type, axes in kinds:
            if isinstance(module, kind):
                yield Watched(name, module, layer_type, layer, hook_layer, axes)
        forward = getattr(type(module), "forward", None)  # a ScriptModule has none
        code = getattr(inspect.unwrap(forward), "__code__", None) if forward is not None else None
        if code is not None and _LOOK_UP in code.co_names:
            axes = dict.fromkeys(_HEADS, 2) | {"output": 1}
            yield Watched(name, module, ATTENTION, layer, lambda *given: [_watch_kernel(*given)], axes)
        for own in fused_parameters(module):
            yield Watched(f"{name}.{own}", module, EXPERTS, layer, hook_experts, {}, parameter=own)


# Package → class → kind of module. Megatron's TEColumnParallelLinear, TEDotProductAttention ... are subclasses of
# TransformerEngine's. The input of a LayerNormLinear is that of its norm, whose output the kernel does not expose.
_MEGATRON = "megatron.core"
_PARALLEL = {
    _MEGATRON: {
        "ColumnParallelLinear": LINEAR, "RowParallelLinear": LINEAR, "VocabParallelEmbedding": EMBEDDING,
        "DotProductAttention": ATTENTION,
    },
    "transformer_engine": {"Linear": LINEAR, "LayerNormLinear": NORM_LINEAR, "DotProductAttention": ATTENTION},
}  # fmt: skip


def find_parallel(root: nn.Module) -> Iterator[Watched]:
    """Every module of these classes or a subclass, its layer counted over all pipeline stages."""
    numbers: dict[str, int] = {}
    for name, module in root.named_modules():
        if isinstance(number := getattr(module, "layer_number", None), int):
            numbers[name] = number - 1
        package, layer_type = _class_of(module)
        layer = next((numbers[one] for one in _enclosing(name) if one in numbers), layer_of(name))
        if layer_type == ATTENTION:
            tokens = 1 if getattr(module, "qkv_format", "sbhd") == "bshd" else 0
            yield Watched(name, module, ATTENTION, layer, hook_attention, dict.fromkeys((*_HEADS, "output"), tokens))
        elif layer_type == EMBEDDING:
            yield Watched(name, module, EMBEDDING, None, hook_layer, {"input": 1, "output": 1})
        elif layer_type:
            hook = partial(hook_layer, takes_weight=package == _MEGATRON, parallel=True)
            yield Watched(name, module, layer_type, layer, hook, {"input": 0, "output": 0})


def _class_of(module: nn.Module) -> tuple[str, str]:
    """Package and kind of the known class that the module is of; empty for others."""
    for kind in type(module).__mro__:
        for package, kinds in _PARALLEL.items():
            if kind.__module__.startswith(f"{package}.") and kind.__name__ in kinds:
                return package, kinds[kind.__name__]
    return "", ""


def _enclosing(name: str) -> Iterator[str]:
    """The module's name, then those of the modules around it, from the inside out."""
    while name:
        yield name
        name = name.rpartition(".")[0]


# Coordinate → group name in the functions of Megatron's parallel_state.
_COORDINATES = {
    "tp": "tensor_model_parallel", "pp": "pipeline_model_parallel", "cp": "context_parallel", "dp": "data_parallel",
    "ep": "expert_model_parallel",
}  # fmt: skip


def find_coordinates(root: nn.Module) -> dict[str, tuple[int, int]]:
    """Coordinate of this process and size of every group of Megatron, or else of the mesh that shards weights."""
    ask: Any = sys.modules.get("megatron.core.parallel_state")
    if ask is not None and ask.model_parallel_is_initialized():
        return {
            name: (getattr(ask, f"get_{group}_rank")(), getattr(ask, f"get_{group}_world_size")())
            for name, group in _COORDINATES.items()
        }
    return {
        name: (mesh.get_local_rank(axis), mesh.size(axis))
        for weight in root.parameters()
        if is_sharded(weight)
        for mesh in [weight.device_mesh]
        for axis, name in enumerate(mesh.mesh_dim_names or ("tp",))
    }


def _describe_parallel(module: Any) -> dict[str, Any]:  # noqa: ANN401 - of a class of _PARALLEL
    """What Megatron's tensor saver records of a layer."""
    group, store, bias = (getattr(module, name, None) for name in ("tp_group", "wgrad_store", "bias"))
    defers = getattr(getattr(module, "config", None), "defer_embedding_wgrad_compute", False)
    defers = (defers and module.grad_output_buffer is not None) or (store is not None and store.delay_wgrad_compute())
    return {
        "sequence_parallel": getattr(module, "sequence_parallel", None),
        "use_bias": getattr(module, "use_bias", bias is not None),  # TransformerEngine's has an empty bias
        "tp_group_size": group.size() if group is not None else None,
        "wgrad_compute": not defers and (module.weight is None or module.weight.requires_grad),
    }


def hook_layer(
    watched: Watched, recorder: Recorder, *, takes_weight: bool = False, parallel: bool = False
) -> list[RemovableHandle]:
    """Hooks that pass a layer's input (its first argument), weight, output and gradients to the recorder.

    The weight is the module's, unless a call that `takes_weight`, as its second argument, has been given another. A
    `parallel` layer has the attributes of Megatron's or TransformerEngine's.
    """
    module: Any = watched.module

    def begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        inputs: Tensor = args[0] if args else next(iter(kwargs.values()))
        if not _is_plain(inputs):
            recorder.leave_out(watched, TENSORS[watched.layer_type], f"the input is {_describe(inputs)}")
            return None
        facts = _describe_parallel(module) if parallel else {}
        if (call := recorder.begin_call(watched, inputs, **facts)) is None:
            return None
        recorder.take(call, "input", inputs)
        if is_parametrized(module, "weight"):
            recorder.leave_out(watched, ["weight"], "a parametrization computes it at every reading")
        else:
            given = (args[1] if len(args) > 1 else kwargs.get("weight")) if takes_weight else None
            recorder.take(call, "weight", module.weight if given is None else given)
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
_LOOK_UP = "get_interface"

_watchers: dict[nn.Module, tuple[Watched, Recorder]] = {}
_original: list[Kernel] = []


@contextmanager
def _watch_kernel(watched: Watched, recorder: Recorder) -> Iterator[None]:
    """Capture the arguments of its kernel; AttentionInterface is restored when no module is watched."""
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
        mask = args[0] if args else kwargs.get("attention_mask")
        call = _take_heads(watched, recorder, (query, key, value), mask)
    result = kernel(module, query, key, value, *args, **kwargs)
    if call is not None:
        recorder.take(call, "output", result[0])
    return result


def _take_heads(
    watched: Watched, recorder: Recorder, heads: Sequence[Tensor], mask: object, **facts: str | None
) -> Call | None:
    """Keep query, key and value of a call, and their gradients."""
    shape = getattr(mask, "shape", None)
    call = recorder.begin_call(watched, heads[0], attention_mask_shape=shape and [*shape], **facts)
    if call is not None:
        for name, tensor in zip(_HEADS, heads, strict=True):
            recorder.take(call, name, tensor)
            recorder.take_gradient(call, f"grad_{name}", tensor)
    return call


def hook_attention(watched: Watched, recorder: Recorder) -> list[RemovableHandle]:
    """Hooks on a module whose first arguments are query, key, value and the mask; its type is a keyword."""
    module: Any = watched.module

    def begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        named: list[Any] = [kwargs.get(name, kwargs.get(f"{name}_layer")) for name in _HEADS]
        named.append(kwargs.get("attention_mask"))
        *heads, mask = (*args[:4], *named[len(args[:4]) :])
        kind = kwargs.get("attn_mask_type") or getattr(module, "attn_mask_type", None)
        return _take_heads(watched, recorder, heads, mask, attn_mask_type=getattr(kind, "name", kind))

    return _hook_calls(module, begin, lambda call, output: recorder.take(call, "output", output))


def hook_experts(watched: Watched, recorder: Recorder) -> list[AbstractContextManager[None]]:
    """Hooks that find the products of one parameter during each call of its module."""

    def begin(*args: Any, **kwargs: Any) -> Kernel:  # noqa: ANN401 - the module's arguments
        chosen: Tensor = args[1] if len(args) > 1 else kwargs["top_k_index"]
        return partial(_run_product, watched, recorder, ProductFinder(watched.module, watched.parameter, chosen))

    return [look_inside(watched.module, begin)]


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
    output: Tensor = func(*args, **kwargs)
    recorder.take(call, "output", output.flatten(1))
    if output.requires_grad:
        output.register_hook(lambda gradient: recorder.take(call, "grad_output", gradient.flatten(1), BACKWARD))
    return output
