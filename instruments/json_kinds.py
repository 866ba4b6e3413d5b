"""What JSON that was read from a file holds: predicates, for files that somebody may have changed."""

from collections.abc import Callable

Kind = Callable[[object], bool]
_LARGEST = 2**63


def is_text(value: object) -> bool:
    """A text that can be written to a file."""
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)


def is_count(value: object) -> bool:
    """A whole number from 0 that fits in 64 bits."""
    return type(value) is int and 0 <= value < _LARGEST


def is_flag(value: object) -> bool:
    """True or false."""
    return isinstance(value, bool)


def is_number(value: object) -> bool:
    """A number; a loss may be nan or infinite."""
    return isinstance(value, float) or (type(value) is int and abs(value) < _LARGEST)


def is_cell(value: object) -> bool:
    """A cell of a table."""
    return value is None or isinstance(value, bool) or is_text(value) or is_number(value)


def optional(kind: Kind) -> Kind:
    """This, or null."""
    return lambda value: value is None or kind(value)


def list_of(kind: Kind, length: int | None = None) -> Kind:
    """A list of these, of any length or of this one."""
    return lambda value: isinstance(value, list) and length in {None, len(value)} and all(map(kind, value))


def object_of(kind: Kind) -> Kind:
    """An object with any keys and these values."""
    return lambda value: isinstance(value, dict) and all(map(is_text, value)) and all(map(kind, value.values()))


def object_with(**kinds: Kind) -> Kind:
    """An object with at least these keys."""
    return lambda value: (
        isinstance(value, dict) and all(name in value and kind(value[name]) for name, kind in kinds.items())
    )
