"""What jaxtyping's import hook puts around every function and dataclass of models and stages."""

import inspect
from collections import Counter
from collections.abc import Callable
from functools import wraps
from types import CodeType
from typing import Any, TypeVar, get_args

import jaxtyping
from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintException

Checked = TypeVar("Checked", bound=Callable)

# Calls of a function that are checked in a test: a check costs as much as a small operation on tensors, and a function
# that a test calls a thousand times has seen its shapes by then.
CALLS = 5
calls: Counter[CodeType] = Counter()
# An int is accepted as a float.
ENFORCE = beartype(conf=BeartypeConf(is_pep484_tower=True))
_jaxtyped = jaxtyping.jaxtyped


def check(function: Checked) -> Checked:
    """Enforce the annotations; functions whose hints beartype cannot check (Self, protocols) are returned unchanged."""
    try:
        return ENFORCE(function)
    except BeartypeDecorHintException:
        return function


def names_shapes(annotation: object) -> bool:
    """Whether an annotation names the axes of a tensor."""
    if isinstance(annotation, str):
        return '"' in annotation
    return hasattr(annotation, "dims") or any(map(names_shapes, get_args(annotation)))


def jaxtyped(*, typechecker: Callable) -> Callable[[Any], Any]:
    """As jaxtyping's, for functions with shapes in their signature and for their first calls in a test."""

    def decorate(target: Any) -> Any:
        if inspect.isclass(target):
            if "__dataclass_fields__" in vars(target):
                target.__init__ = decorate(target.__init__)
            return target
        if not inspect.isfunction(target) or not any(map(names_shapes, target.__annotations__.values())):
            return target
        code, checked = target.__code__, None

        @wraps(target)
        def sampled(*args: Any, **keywords: Any) -> Any:
            nonlocal checked
            calls[code] += 1
            if calls[code] > CALLS:
                return target(*args, **keywords)
            checked = checked or _jaxtyped(target, typechecker=typechecker)
            return checked(*args, **keywords)

        return sampled

    return decorate


def install(packages: list[str]) -> None:
    """Check the modules of these packages that are imported from now on."""
    jaxtyping.jaxtyped = jaxtyped
    jaxtyping.install_import_hook(packages, "shape_checking.check")
