"""Hooks of a module that its copies and pickles do not have."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch


class OwnHook:
    """A hook; copied or pickled with its module, as in an average of weights or `torch.save`, it does nothing."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def __call__(self, *args: Any) -> Any:  # noqa: ANN401 - any arguments and result of a hook
        """Run it."""
        return self._run(*args)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, str]]:
        """A function of the standard library that takes any arguments and returns None."""
        return getattr, (nullcontext(), "__exit__")


class EagerHook(OwnHook):
    """A hook that torch.compile does not trace: the module is compiled in parts, before and after its hooks."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__(torch.compiler.disable(run) if "torch._dynamo" in sys.modules else run)
