"""Sequences and their norms in memory, on the way into a file or out of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from instruments.mscan.header import Header

# One row per sequence ...
SEQUENCE_ARRAYS = ("activation", "gradient", "in_activation", "in_gradient", "out_gradient")
# ... and one per token.
TOKEN_ARRAYS = ("token_activation", "token_gradient")


@dataclass(frozen=True)
class StoredSequence:
    """One sequence: its number in the scan, unique within a file, and what it is called there."""

    number: int
    name: str
    tokens: int
    source: str = ""


@dataclass(frozen=True)
class Rows:
    """B sequences; float32 arrays (B, P), (B, I), (B, O) and, where tokens are kept, (Σtokens, P)."""

    sequences: tuple[StoredSequence, ...]
    arrays: dict[str, NDArray[np.float32]]

    def cut(self, start: int, stop: int) -> "Rows":
        """Sequences `start` to `stop`, without a copy."""
        token = self.first_tokens()
        bounds = {name: slice(start, stop) for name in SEQUENCE_ARRAYS}
        bounds |= {name: slice(token[start], token[stop]) for name in TOKEN_ARRAYS}
        return Rows(self.sequences[start:stop], {name: array[bounds[name]] for name, array in self.arrays.items()})

    def first_tokens(self) -> list[int]:
        """Row of each sequence's first token, and the number of tokens."""
        return [0, *accumulate(sequence.tokens for sequence in self.sequences)]

    def nbytes(self) -> list[int]:
        """Bytes of each sequence's float32 rows."""
        fixed = 4 * sum(array.shape[1] for name, array in self.arrays.items() if name in SEQUENCE_ARRAYS)
        token = 4 * sum(array.shape[1] for name, array in self.arrays.items() if name in TOKEN_ARRAYS)
        return [fixed + token * sequence.tokens for sequence in self.sequences]


def array_widths(header: Header) -> dict[str, int]:
    """The arrays of every segment, in the order of the file, each with its number of columns."""
    parameters, inputs, outputs = header.table.widths
    widths = dict(zip(SEQUENCE_ARRAYS, (parameters, parameters, inputs, inputs, outputs), strict=True))
    return widths | dict.fromkeys(TOKEN_ARRAYS if header.per_token else (), parameters)


def join(parts: Sequence[Rows]) -> Rows:
    """All parts, one after the other."""
    if len(parts) == 1:
        return parts[0]
    arrays = {name: np.concatenate([part.arrays[name] for part in parts]) for name in parts[0].arrays}
    return Rows(tuple(sequence for part in parts for sequence in part.sequences), arrays)
