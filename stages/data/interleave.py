"""Taking turns between sources, so that the first documents already come from many of them."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def interleave(sources: Iterable[Iterable[Item]]) -> Iterator[Item]:
    """One item of each source in turn, until all are spent. A source is first touched when its turn comes."""
    waiting = [iter(source) for source in sources]
    while waiting:
        still_waiting = []
        for source in waiting:
            for item in source:
                yield item
                still_waiting.append(source)
                break
        waiting = still_waiting
