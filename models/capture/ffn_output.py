"""Inputs and outputs of every layer's FFN, dense or carved, wherever an architecture keeps its parts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

OnFFN = Callable[[int, Tensor, Tensor], None]


@contextmanager
def watch_ffns(model: PreTrainedModel, on_ffn: OnFFN) -> Iterator[None]:
    """Call `on_ffn(layer, inputs, outputs)` for every FFN of a forward pass; leaves no hook behind."""
    handles: list[RemovableHandle] = []
    try:
        for layer, module in enumerate(model.get_decoder().layers):
            parts = ffn_parts(module)
            watch = _Sum(layer, len(parts), on_ffn)
            handles += [part.register_forward_hook(watch) for part in parts]
        yield
    finally:
        for handle in handles:
            handle.remove()


def ffn_parts(layer: nn.Module) -> list[nn.Module]:
    """The modules of a decoder layer whose outputs sum to its FFN's."""
    modules = dict(layer.named_children())
    if "mlp" in modules:
        return [modules["mlp"]]
    # Granite's experts, and its always-on units where it has some.
    return [modules[name] for name in ("block_sparse_moe", "shared_mlp") if name in modules]


class _Sum:
    """A forward hook of several modules that speaks when the last of them has run."""

    def __init__(self, layer: int, parts: int, on_ffn: OnFFN) -> None:
        self._layer, self._parts, self._on_ffn = layer, parts, on_ffn
        self._outputs: list[Tensor] = []

    def __call__(self, _module: nn.Module, args: tuple[Tensor, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        self._outputs.append(output[0] if isinstance(output, tuple) else output)
        if len(self._outputs) == self._parts:
            outputs, self._outputs = self._outputs, []
            self._on_ffn(self._layer, args[0], sum(outputs[1:], outputs[0]))
