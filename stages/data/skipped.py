"""Sequences from which nothing can be learned: why, how many, and which."""

from collections.abc import Mapping, Sequence

from models.errors import DataError
from stages.data.config import DataConfig
from stages.data.document import Split
from stages.data.encoding import IGNORED
from stages.data.sources import describe_emptiness, describe_source

# Names of skipped sequences, by what is wrong with them.
Skipped = Mapping[str, Sequence[str]]

TOO_SHORT = "fewer than 2 tokens"
ALL_MASKED = "no token counts in the loss"
FIRST_ONLY = "the only label is at the first token, which nothing predicts"
# A table's note names so many of each fault; the mapping holds all.
NAMED = 5


def find_fault(labels: Sequence[int]) -> str | None:
    """Why nothing can be learned from a sequence with these labels (not shifted); None where something can."""
    if len(labels) < 2:
        return TOO_SHORT
    if any(label != IGNORED for label in labels[1:]):
        return None
    return ALL_MASKED if labels[0] == IGNORED else FIRST_ONLY


def describe_skipped(skipped: Skipped) -> list[str]:
    """A sentence per fault, for tables and logs: how many sequences were skipped for it, and the first of their names.

    Every name is in the mapping itself.
    """
    return [
        f"skipped {len(names)} {'sequence' if len(names) == 1 else 'sequences'} ({fault}: {_list_names(names)})"
        for fault, names in skipped.items()
        if names
    ]


def _list_names(names: Sequence[str]) -> str:
    named = ", ".join(names[:NAMED])
    return named if len(names) <= NAMED else f"{named} and {len(names) - NAMED} more"


def describe_nothing_left(data: DataConfig, split: Split, skipped: Skipped) -> DataError:
    """The error of text of which no sequence could be used."""
    where = f"{split} text of {describe_source(data, split)}"
    masked, shifted, short = (len(skipped.get(fault, ())) for fault in (ALL_MASKED, FIRST_ONLY, TOO_SHORT))
    if masked or shifted:
        what = f"every label is masked: none of {masked + shifted} sequences has a token that counts in the loss"
        if shifted:
            what += f"; in {shifted} of them {FIRST_ONLY}"
        return DataError(
            what,
            where=f"{where}, data.labels={data.labels}, data.max_length={data.max_length}",
            do="a larger data.max_length, if the answers begin after the cut, or data.labels=full_sequence",
        )
    if short:
        return DataError(f"none of {short} sequences has 2 tokens", where=where, do="name text that holds more")
    return describe_emptiness(data, split)
