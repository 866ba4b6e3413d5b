"""A running text to documents."""

from collections.abc import Iterable, Iterator


def cut_passages(lines: Iterable[str], shortest: int, longest: int) -> Iterator[tuple[int, str]]:
    """Cut at the first blank line after `shortest` characters, or at the first line's end after `longest`.

    Returns:
        The number of each passage's first line, counted from 1, and its text, without white space around it. Passages
        of nothing but white space are left out.
    """
    passage: list[str] = []
    length = first = 0
    for number, line in enumerate(lines, start=1):
        first = first if passage else number
        passage.append(line)
        length += len(line)
        if length >= longest or (length >= shortest and not line.strip()):
            yield from _strip(first, passage)
            passage, length = [], 0
    yield from _strip(first, passage)


def _strip(first: int, passage: list[str]) -> Iterator[tuple[int, str]]:
    if text := "".join(passage).strip():
        yield first, text
