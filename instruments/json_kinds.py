"""JSON in files: type predicates for what is read, as it may have been edited; strict values for what is written."""

import math
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

Kind = Callable[[object], bool]
_LARGEST = 2**63


def is_text(value: object) -> bool:
    """A string without surrogates, so that it can be encoded."""
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)


def is_count(value: object) -> bool:
    """An integer from 0 to 2⁶³ − 1."""
    return type(value) is int and 0 <= value < _LARGEST


def is_flag(value: object) -> bool:
    """True or false."""
    return isinstance(value, bool)


def is_number(value: object) -> bool:
    """A number; a loss may be NaN or infinite."""
    return isinstance(value, float) or (type(value) is int and abs(value) < _LARGEST)


def is_anything(_value: object) -> bool:
    """Any JSON value."""
    return True


def list_of(kind: Kind, length: int | None = None) -> Kind:
    """A list of this kind; `length` None allows any length."""
    return lambda value: isinstance(value, list) and length in {None, len(value)} and all(map(kind, value))


def object_of(kind: Kind) -> Kind:
    """An object with any keys and values of this kind."""
    return lambda value: isinstance(value, dict) and all(map(is_text, value)) and all(map(kind, value.values()))


_PLAIN: dict[object, Kind] = {int: is_count, float: is_number, str: is_text, bool: is_flag}


def kind_of(hint: Any) -> Kind:  # noqa: ANN401 - any annotation
    """The predicate of an annotation: plain type, X | None, list, tuple, mapping from str, dataclass; else anything."""
    origin, parts = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        parts_of = kinds_of(hint)
        return lambda value: (
            isinstance(value, dict) and all(n in value and kind(value[n]) for n, kind in parts_of.items())
        )
    if origin is UnionType:
        given = kind_of(parts[0])
        return lambda value: value is None or given(value)
    if origin in {list, tuple}:
        return list_of(kind_of(parts[0]), None if origin is list or ... in parts else len(parts))
    if origin in {dict, Mapping}:
        return object_of(kind_of(parts[1]))
    return _PLAIN.get(hint, is_anything)


def kinds_of(fields: Any) -> dict[str, Kind]:  # noqa: ANN401 - a dataclass
    """The predicate of every field of a dataclass."""
    return {name: kind_of(hint) for name, hint in get_type_hints(fields).items()}


def check_fields(content: Any, kinds: Mapping[str, Kind]) -> None:  # noqa: ANN401 - any JSON
    """Raise ValueError, naming every field that is missing or of another type."""
    if not isinstance(content, dict):
        raise ValueError("it is not an object")
    if wrong := [name for name, is_kind in kinds.items() if name not in content or not is_kind(content[name])]:
        raise ValueError(f"{', '.join(wrong)} missing or of another type")


def plain_json(value: Any) -> Any:  # noqa: ANN401 - JSON values
    """Make a value strict JSON: non-finite floats become text that float() reads, tuples become lists."""
    if isinstance(value, dict):
        return {key: plain_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
