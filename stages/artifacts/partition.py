"""cluster → extract, assemble, project, evaluate: the neurons of every expert, of one layer or of a pool."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from instruments.errors import ContractError
from models.shape import Shape
from stages.artifacts.tensor_file import load_contract, save_contract


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


@dataclass(frozen=True)
class PoolPartition:
    """Experts of the first layer's units, then those of the second's, and so on; one layer gives each expert all units.

    A unit is always on in its layer, or in one or more experts (never twice in one), or dropped.
    """

    VERSION: ClassVar[int] = 1
    FILE: ClassVar[str] = "pool_partition.safetensors"

    width: int  # F
    units: Tensor  # (E, N) int32, in the expert's home layer
    home: Tensor  # (E,) int32, the layer an expert was cut from; ascends
    always_on: Tensor  # (L, S) int32
    description: str = ""  # how it was made, in a sentence

    def __post_init__(self) -> None:
        """Refuse what is no partition."""
        shapes = [tuple(tensor.shape) for tensor in (self.units, self.home, self.always_on)]
        if [len(shape) for shape in shapes] != [2, 1, 2] or len(self.units) != len(self.home):
            raise ContractError(f"pool partition shapes {', '.join(map(str, shapes))}")
        if len(self.home) and (self.home.diff() < 0).any() | (self.home[0] < 0) | (self.home[-1] >= self.layers):
            raise ContractError(f"home layers do not ascend within 0..{self.layers - 1}", where="pool partition")
        for layer in range(self.layers):
            check_layer(self.units_of(layer), self.always_on[layer], self.width, f"pool partition, layer {layer}")

    @property
    def layers(self) -> int:
        """L."""
        return len(self.always_on)

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """L, E, N, S, F."""
        return (self.layers, *self.units.shape, self.always_on.shape[1], self.width)

    @property
    def given(self) -> list[int]:
        """Experts that every layer gives to the pool."""
        counts: list[int] = self.home.long().bincount(minlength=self.layers).tolist()
        return counts

    def units_of(self, layer: int) -> Tensor:
        """(e, N) units of the experts that the layer gives."""
        return self.units[self.home == layer]

    @property
    def multiplicity(self) -> Tensor:
        """(L, F) int64: how many experts hold the unit; 0 for always-on and dropped units."""
        counts = [self.units_of(layer).flatten().long().bincount(minlength=self.width) for layer in range(self.layers)]
        return torch.stack(counts)

    def save(self, folder: Path) -> None:
        """Write `folder/pool_partition.safetensors`."""
        save_contract(self, folder / self.FILE, version=self.VERSION)

    @classmethod
    def load(cls, folder: Path) -> "PoolPartition":
        """Read what `save` wrote. Raises ContractError."""
        return load_contract(cls, folder / cls.FILE, version=cls.VERSION)


def load_partition(folder: Path, shape: Shape) -> Partition | PoolPartition:
    """The partition of a shape's topology. Raises ContractError."""
    return PoolPartition.load(folder) if shape.pooled else Partition.load(folder)
