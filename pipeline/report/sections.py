"""The parts of the page that every section is made of."""

from stages.plots.markup import Markup, element


def section(name: str, title: str, *content: str) -> Markup:
    """A section with its heading; empty where there is nothing to show."""
    if not any(content):
        return Markup()
    return element("section", element("h2", title), *content, id=name)


def figure(title: str, drawing: Markup, caption: str = "", *, kind: str | None = None) -> Markup:
    """A drawing with its title above and what has to be known to read it below."""
    words = element("figcaption", caption) if caption else ""
    return element("figure", element("h3", title), drawing, words, class_=kind)


def folded(title: str, *content: str) -> Markup:
    """What only some readers want, behind a line to click."""
    return element("details", element("summary", title), *content)


def paragraph(words: str, kind: str | None = None) -> Markup:
    """A paragraph."""
    return element("p", words, class_=kind)
