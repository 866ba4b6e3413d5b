"""A running text to documents."""

from collections.abc import Iterable, Iterator


def cut_passages(lines: Iterable[str], shortest: int, longest: int) -> Iterator[tuple[int, str]]:
    """Cut at the first blank line after `shortest` characters, or at the first line's end after `longest`.

    Returns:
        The number of each passage's first line, counted from 1, and its text, without blank lines before it and white
        space after it.
    """
    passage: list[str] = []
    length = first = 0
    for number, line in enumerate(lines, start=1):
        blank = not line.strip()
        if not passage and blank:
            continue
        first = first if passage else number
        passage.append(line)
        length += len(line)
        if length >= longest or (length >= shortest and blank):
            yield first, "".join(passage).rstrip()
            passage, length = [], 0
    if passage:
        yield first, "".join(passage).rstrip()
