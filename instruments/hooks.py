"""Hooks of a module that its copies and pickles do not have."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any


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
