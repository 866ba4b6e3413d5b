"""nn.Linear: its input, its weight and the gradient of its output."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from models.dump.config import LINEAR
from models.dump.recorder import Call, Recorder
from models.dump.sharded_weights import part_of_features, take_local
from models.dump.watched import Watched, layer_of


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
