"""cluster → extract, assemble, project, evaluate: which unit belongs to which expert."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from models.errors import ContractError
from stages.contracts.tensor_file import load_contract, save_contract


@dataclass(frozen=True)
class Partition:
    """Units of every expert, sorted within the expert, and the always-on units, sorted.

    A unit is always on, or in one or more experts (never twice in one), or dropped.
    """

    VERSION: ClassVar[int] = 1
    FILE: ClassVar[str] = "partition.safetensors"

    width: int  # F
    units: Tensor  # (L, E, N) int32
    always_on: Tensor  # (L, S) int32
    description: str = ""  # how it was made, in a sentence

    def __post_init__(self) -> None:
        """Refuse what is no partition."""
        if self.units.ndim != 3 or self.always_on.ndim != 2 or len(self.units) != len(self.always_on):
            raise ContractError(f"partition shapes {tuple(self.units.shape)} and {tuple(self.always_on.shape)}")
        for layer, (units_EN, always_S) in enumerate(zip(self.units, self.always_on, strict=True)):
            check_layer(units_EN, always_S, self.width, f"partition, layer {layer}")

    @property
    def layers(self) -> int:
        """L."""
        return len(self.units)

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """L, E, N, S, F."""
        layers, experts, n = self.units.shape
        return layers, experts, n, self.always_on.shape[1], self.width

    def units_of(self, layer: int) -> Tensor:
        """(E, N) units of the layer's experts."""
        return self.units[layer]

    @property
    def multiplicity(self) -> Tensor:
        """(L, F) int64: how many experts hold the unit; 0 for always-on and dropped units."""
        flat = self.units.flatten(1).long()
        counts = torch.zeros(len(flat), self.width, dtype=torch.int64)
        return counts.scatter_add_(1, flat, torch.ones_like(flat))

    def save(self, folder: Path) -> None:
        """Write `folder/partition.safetensors`."""
        save_contract(self, folder / self.FILE, version=self.VERSION)

    @classmethod
    def load(cls, folder: Path) -> "Partition":
        """Read what `save` wrote. Raises ContractError."""
        return load_contract(cls, folder / cls.FILE, version=cls.VERSION)


def check_layer(units_EN: Tensor, always_S: Tensor, width: int, where: str) -> None:
    """Refuse experts and always-on units of a layer that are no partition. Raises ContractError."""
    used = torch.cat([units_EN.flatten(), always_S])
    if len(used) and (used.min() < 0 or used.max() >= width):
        raise ContractError(f"unit index outside 0..{width - 1}", where=where)
    if any(len(row.unique()) != len(row) for row in units_EN) or len(torch.unique(always_S)) != len(always_S):
        raise ContractError("a unit stands twice in one expert", where=where)
    if torch.isin(units_EN, always_S).any():
        raise ContractError("an always-on unit is also in an expert", where=where)
