"""Running sums of a scan, and which batches are in them."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# Shape and number format of each tensor.
Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]

# How two parts of a scan become one; every other tensor is added.
_COMBINE = {"max_abs": torch.maximum, "bits_LRf": torch.bitwise_or}


@dataclass
class ScanSums:
    """What a part of the scan has found.

    `tensors` are (L, F) sums, float64, but for max_abs (a maximum), active_count (int64) and bits_LRf (uint8: packed
    activation bits of the reservoir's tokens; rows of tokens not read are zero). `counters` are plain sums. `done` are
    the numbers of the batches that are in it: two parts may be added when they share none.
    """

    tensors: dict[str, Tensor]
    counters: dict[str, float] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)

    def add(self, part: "ScanSums") -> None:
        """Add another part in place."""
        assert not self.done & part.done, "a batch would count twice"
        for name, value in part.tensors.items():
            total = self.tensors[name]
            _COMBINE.get(name, torch.add)(total, value.to(total.dtype), out=total)
        for name, count in part.counters.items():
            self.counters[name] = self.counters.get(name, 0) + count
        self.done |= part.done


def empty_sums(shapes: Shapes) -> ScanSums:
    """Nothing, in tensors of the given shapes and number formats."""
    return ScanSums({name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()})


def total_of(parts: Iterable[ScanSums], shapes: Shapes) -> ScanSums:
    """All parts together."""
    total = empty_sums(shapes)
    for part in parts:
        total.add(part)
    return total


def describe_differences(held: str, wanted: str) -> str:
    """The facts in which two identities differ, each a JSON object: theirs, and ours in brackets."""
    return ", ".join(list_differences(json.loads(held), json.loads(wanted)))


def list_differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """One entry for each fact that is not the same."""
    return [
        f"{name} {theirs.get(name, 'unset')} (here {ours.get(name, 'unset')})"
        for name in sorted(theirs.keys() | ours.keys())
        if theirs.get(name) != ours.get(name)
    ]
