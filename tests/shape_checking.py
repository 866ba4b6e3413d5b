"""The type checker that jaxtyping's import hook calls for every function of models and stages."""

from collections.abc import Callable
from typing import TypeVar

from beartype import beartype
from beartype.roar import BeartypeDecorHintPep673Exception

Checked = TypeVar("Checked", bound=Callable)


def check(function: Checked) -> Checked:
    """Enforce the annotations; a method that returns Self, which beartype takes on whole classes only, passes as is."""
    try:
        return beartype(function)
    except BeartypeDecorHintPep673Exception:
        return function
