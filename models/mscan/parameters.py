"""The parameter table of a file: which column belongs to which weight and block."""

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from itertools import accumulate, pairwise
from math import ceil
from typing import Protocol

from models.errors import ContractError


class Watched(Protocol):
    """What is taken from a watched weight."""

    @property
    def name(self) -> str:
        """Of the weight: model.layers.0.self_attn.q_proj.weight."""

    @property
    def kind(self) -> str:
        """Linear or embedding."""

    @property
    def in_features(self) -> int:
        """Columns of the weight; for an embedding, its rows."""

    @property
    def out_features(self) -> int:
        """Rows of the weight; for an embedding, its columns."""


@dataclass(frozen=True)
class StoredParameter:
    """One weight of the table; all names of its fields are those of the scanner's WatchedParameter."""

    name: str
    kind: str
    in_features: int
    out_features: int


@dataclass(frozen=True)
class ParameterTable:
    """P weights in the order of the columns; I input blocks and O output blocks, one weight's after another's."""

    entries: tuple[StoredParameter, ...]
    block_width: int

    @classmethod
    def of(cls, parameters: Iterable[Watched], block_width: int) -> "ParameterTable":
        """The table of what a scanner watches."""
        entries = (StoredParameter(p.name, p.kind, p.in_features, p.out_features) for p in parameters)
        return cls(tuple(entries), block_width)

    @property
    def names(self) -> list[str]:
        """Names in the order of the columns."""
        return [entry.name for entry in self.entries]

    @cached_property
    def input_columns(self) -> list[slice]:
        """Where each weight's input blocks lie; an embedding has none, its inputs are looked up and not multiplied."""
        return _slices(0 if entry.kind == "embedding" else self._blocks(entry.in_features) for entry in self.entries)

    @cached_property
    def output_columns(self) -> list[slice]:
        """Where each weight's output blocks lie."""
        return _slices(self._blocks(entry.out_features) for entry in self.entries)

    @property
    def widths(self) -> tuple[int, int, int]:
        """P, I and O."""
        if not self.entries:
            return 0, 0, 0
        return len(self.entries), self.input_columns[-1].stop, self.output_columns[-1].stop

    def index(self, name: str) -> int:
        """Column of the weight `name`. Raises ContractError."""
        if name in self.names:
            return self.names.index(name)
        near = get_close_matches(name, self.names, n=1, cutoff=0.0)
        raise ContractError(
            f"no parameter {name}; there are {len(self.entries)}",
            where="parameter table of the .mscan file",
            do=f"say {near[0]}" if near else "scan a model that has one",
        )

    def _blocks(self, features: int) -> int:
        return ceil(features / self.block_width)


def _slices(counts: Iterable[int]) -> list[slice]:
    return [slice(start, stop) for start, stop in pairwise(accumulate(counts, initial=0))]
