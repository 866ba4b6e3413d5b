"""The type checker that jaxtyping's import hook calls for every function of models and stages."""

from collections.abc import Callable
from typing import TypeVar

from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintException

Checked = TypeVar("Checked", bound=Callable)

# An int is accepted as a float.
ENFORCE = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check(function: Checked) -> Checked:
    """Enforce the annotations; functions whose hints beartype cannot check (Self, protocols) are returned unchanged."""
    try:
        return ENFORCE(function)
    except BeartypeDecorHintException:
        return function
