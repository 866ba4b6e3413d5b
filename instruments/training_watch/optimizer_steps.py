"""Notice the steps of all torch optimizers when their gradients are there."""

import weakref
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle


def on_each_step(look: Callable[[Optimizer], None]) -> RemovableHandle:
    """Call the bound method `look` at every step of an optimizer, and do not keep its object alive.

    Before the step; if a closure computes the gradients, as with LBFGS and Lightning, after its first evaluation.
    """
    method = weakref.WeakMethod(look)

    def before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        closure: Any = args[1] if len(args) > 1 else kwargs.get("closure")
        waiting = [optimizer]

        def look_once() -> None:
            if waiting and (found := method()) is not None:
                found(waiting.pop())

        def evaluate(*given: Any, **named: Any) -> Any:  # noqa: ANN401 - any closure
            result = closure(*given, **named)
            look_once()
            return result

        if not callable(closure):
            look_once()
            return None
        return ((args[0], evaluate, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": evaluate})

    return register_optimizer_step_pre_hook(before_step)
