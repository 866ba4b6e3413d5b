"""The parameter table: watched weights, their blocks, and their columns in a record or file."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from itertools import accumulate, pairwise
from math import ceil

from instruments.errors import ContractError


@dataclass(frozen=True)
class WatchedParameter:
    """One watched weight, (out_features, in_features), and its blocks.

    Input block i holds columns i·width to (i+1)·width of the weight, output block o the same rows; the last may be
    narrower. Where the outputs of an attention layer are heads (or the inputs, for its output projection), a block is a
    head. An embedding (V, D) has no input blocks, because rows are looked up, and its output blocks are blocks of D.
    For a Conv1D, whose weight is stored as (in_features, out_features), columns and rows are exchanged.
    """

    name: str  # model.layers.0.self_attn.q_proj.weight; of a fused expert: ...mlp.experts.3.gate_up_proj
    kind: str  # linear or embedding
    in_features: int
    out_features: int
    block_width: int
    in_head: int | None = None  # width of a head if inputs are heads
    out_head: int | None = None

    @property
    def in_width(self) -> int:
        """Columns of an input block."""
        return self.in_head or self.block_width

    @property
    def out_width(self) -> int:
        """Rows of an output block."""
        return self.out_head or self.block_width

    @property
    def in_blocks(self) -> int:
        """Number of input blocks."""
        return 0 if self.kind == "embedding" else ceil(self.in_features / self.in_width)

    @property
    def out_blocks(self) -> int:
        """Number of output blocks."""
        return ceil(self.out_features / self.out_width)


@dataclass(frozen=True)
class ParameterTable:
    """P weights in column order; I input blocks and O output blocks, concatenated over the weights."""

    entries: tuple[WatchedParameter, ...]
    block_width: int

    @property
    def names(self) -> list[str]:
        """Names in column order."""
        return [entry.name for entry in self.entries]

    @cached_property
    def input_columns(self) -> list[slice]:
        """Columns of each weight's input blocks."""
        return _columns(entry.in_blocks for entry in self.entries)

    @cached_property
    def output_columns(self) -> list[slice]:
        """Columns of each weight's output blocks."""
        return _columns(entry.out_blocks for entry in self.entries)

    @cached_property
    def widths(self) -> tuple[int, int, int]:
        """P, I and O."""
        blocks = [(entry.in_blocks, entry.out_blocks) for entry in self.entries]
        return len(blocks), sum(inputs for inputs, _ in blocks), sum(outputs for _, outputs in blocks)

    def index(self, name: str) -> int:
        """Column of the weight `name`. Raises ContractError."""
        if name in self.names:
            return self.names.index(name)
        near = get_close_matches(name, self.names, n=1, cutoff=0.0)
        what = f"no parameter {name}; there are {len(self.entries)}"
        do = f"say {near[0]}" if near else "scan a model that has one"
        raise ContractError(what, where="parameter table of the .mscan file", do=do)


def _columns(blocks: Iterable[int]) -> list[slice]:
    return [slice(start, stop) for start, stop in pairwise(accumulate(blocks, initial=0))]


_NUMBERED = re.compile(r"\.(\d+)\.(.+)")


def locate(name: str) -> tuple[int | None, str]:
    """Layer and module of a weight: model.layers.3.self_attn.q_proj.weight is (3, self_attn.q_proj)."""
    module = name.removesuffix(".weight")
    numbered = _NUMBERED.search(module)
    if numbered is None:
        return None, module.rpartition(".")[2]
    return int(numbered[1]), numbered[2]


def module_of(name: str) -> str:
    """Full name of a weight's module, with * for the layer: decoder.block.*.layer.0.SelfAttention.q."""
    return _NUMBERED.sub(r".*.\2", name.removesuffix(".weight"), count=1)
