"""HTML and SVG as text in which nothing foreign can become markup."""

from html import escape
from xml.sax.saxutils import quoteattr

VOID = frozenset({"meta", "img", "input", "br", "hr", "path", "rect", "line", "circle", "polyline", "polygon"})


class Markup(str):
    """Text that is markup already; every other string is escaped where it is put into an element."""

    __slots__ = ()


def element(name: str, *children: str, **attributes: str | float | bool | None) -> Markup:
    """One element.

    Args:
        name: of the tag.
        children: put inside one after the other; escaped unless they are `Markup`.
        attributes: `_` stands for `-`, and one at the end (`class_`, `for_`) is dropped; True gives the bare name,
            None and False leave the attribute out.
    """
    words = [name, *filter(None, (_attribute(key, value) for key, value in attributes.items()))]
    if name in VOID and not children:
        return Markup(f"<{' '.join(words)}/>")
    return Markup(f"<{' '.join(words)}>{join(*children)}</{name}>")


def join(*children: str) -> Markup:
    """Several pieces as one; escaped unless they are `Markup`."""
    return Markup("".join(child if isinstance(child, Markup) else escape(child) for child in children))


def _attribute(key: str, value: str | float | bool | None) -> str:
    name = key.rstrip("_").replace("_", "-")
    if value is None or value is False:
        return ""
    if value is True:
        return name
    return f"{name}={quoteattr(shown_number(value) if isinstance(value, float | int) else value)}"


def shown_number(value: float) -> str:
    """A coordinate with the two decimals a screen can show."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if value % 1 else f"{value:.0f}"
