"""Rules that stand beside a setting, in the metadata of its dataclass field.

    method: str = field(default="rank", metadata={"choices": ("rank", "random")})
    iterations: int = field(default=20, metadata={"minimum": 1})

Keys: `choices`, `minimum`, `maximum`, `above` (exclusive minimum). In a list they hold for every item.
"""

from collections.abc import Iterable, Iterator
from dataclasses import Field, fields, is_dataclass
from difflib import get_close_matches
from operator import gt, le, lt
from typing import Any

from models.errors import ConfigError

LIMITS = {"minimum": (lt, "at least"), "above": (le, "above"), "maximum": (gt, "at most")}


def field_errors(node: Any, prefix: str = "") -> Iterator[ConfigError]:  # noqa: ANN401 - any settings dataclass
    """Every setting, at any depth, that breaks the rule beside it."""
    for spec in fields(node):
        value, name = getattr(node, spec.name), f"{prefix}{spec.name}"
        if is_dataclass(value):
            yield from field_errors(value, f"{name}.")
        elif value is not None:
            for item in value if isinstance(value, list) else [value]:
                yield from value_errors(name, item, spec)


def value_errors(name: str, value: Any, spec: Field[Any]) -> Iterator[ConfigError]:  # noqa: ANN401 - any value
    """What is wrong with one value; the remedy is the default, or the bound itself."""
    choices = spec.metadata.get("choices", ())
    if choices and value not in choices:
        yield unknown_choice(name, value, choices)
    for rule, (breaks, words) in LIMITS.items():
        bound = spec.metadata.get(rule)
        if bound is not None and breaks(value, bound):
            remedy = spec.default if isinstance(spec.default, int | float) else bound
            yield ConfigError(f"{name}={value} must be {words} {bound}", where=f"setting {name}", do=f"{name}={remedy}")


def unknown_choice(name: str, value: object, choices: Iterable[object]) -> ConfigError:
    """The error for a name outside a closed list, with the closest name as the remedy."""
    known = [str(choice) for choice in choices]
    close = get_close_matches(str(value), known, n=1, cutoff=0.4)
    return ConfigError(
        f"{name}={value} is none of {', '.join(known)}", where=f"setting {name}", do=f"{name}={(close or known)[0]}"
    )
