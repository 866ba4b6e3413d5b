"""Attention of transformers: query, key and value as the kernel gets them, whichever kernel is chosen.

Every attention layer asks `AttentionInterface` for its kernel, by the name of the implementation (eager, sdpa,
flash_attention_2 ...) and with its own eager one at hand. While something is watched, the kernel that is given out
looks at its arguments first; afterwards the interface is what it was.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from models.dump.config import ATTENTION
from models.dump.recorder import Recorder
from models.dump.sharded_weights import part_of_heads
from models.dump.watched import Watched, layer_of

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
