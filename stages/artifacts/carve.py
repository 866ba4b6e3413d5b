"""cluster, assemble → later stages: the neurons of every expert, and the routers that choose among the experts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from instruments.errors import ContractError
from models.config import MoEShape
from models.routing import LinearRouter, rounded
from stages.artifacts.tensor_file import TensorFile


@dataclass(frozen=True)
class Partition(TensorFile):
    """Neurons of every expert, sorted within the expert, and the always-on neurons, sorted.

    A neuron is always on, or in one or more experts (never twice in one), or dropped.
    """

    VERSION: ClassVar[int] = 1
    FILE: ClassVar[str] = "partition.safetensors"

    width: int  # F
    neurons: Tensor  # (L, E, N) int32
    always_on: Tensor  # (L, S) int32
    description: str = ""  # how it was made, in a sentence

    def __post_init__(self) -> None:
        """Refuse what is no partition."""
        if self.neurons.ndim != 3 or self.always_on.ndim != 2 or len(self.neurons) != len(self.always_on):
            raise ContractError(f"partition shapes {tuple(self.neurons.shape)} and {tuple(self.always_on.shape)}")
        for layer, (neurons_EN, always_S) in enumerate(zip(self.neurons, self.always_on, strict=True)):
            check_layer(neurons_EN, always_S, self.width, f"partition, layer {layer}")

    @property
    def layers(self) -> int:
        """L."""
        return len(self.neurons)

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """L, E, N, S, F."""
        layers, experts, n = self.neurons.shape
        return layers, experts, n, self.always_on.shape[1], self.width

    def neurons_of(self, layer: int) -> Tensor:
        """(E, N) neurons of the layer's experts."""
        return self.neurons[layer]

    @property
    def multiplicity(self) -> Tensor:
        """(L, F) int64: how many experts hold the neuron; 0 for always-on and dropped neurons."""
        flat = self.neurons.flatten(1).long()
        counts = torch.zeros(len(flat), self.width, dtype=torch.int64)
        return counts.scatter_add_(1, flat, torch.ones_like(flat))


def check_layer(neurons_EN: Tensor, always_S: Tensor, width: int, where: str) -> None:
    """Refuse experts and always-on neurons of a layer that are no partition. Raises ContractError."""
    used = torch.cat([neurons_EN.flatten(), always_S])
    if len(used) and (used.min() < 0 or used.max() >= width):
        raise ContractError(f"neuron index outside 0..{width - 1}", where=where)
    if any(len(row.unique()) != len(row) for row in neurons_EN) or len(torch.unique(always_S)) != len(always_S):
        raise ContractError("a neuron stands twice in one expert", where=where)
    if torch.isin(neurons_EN, always_S).any():
        raise ContractError("an always-on neuron is also in an expert", where=where)


@dataclass(frozen=True)
class PoolPartition(TensorFile):
    """Experts layer by layer: all neurons of an expert come from one layer.

    A neuron is always on in its layer, or in one or more experts (never twice in one), or dropped.
    """

    VERSION: ClassVar[int] = 1
    FILE: ClassVar[str] = "pool_partition.safetensors"

    width: int  # F
    neurons: Tensor  # (E, N) int32, in the expert's home layer
    home: Tensor  # (E,) int32, the layer an expert was cut from; ascends
    always_on: Tensor  # (L, S) int32
    description: str = ""  # how it was made, in a sentence

    def __post_init__(self) -> None:
        """Refuse what is no partition."""
        shapes = [tuple(tensor.shape) for tensor in (self.neurons, self.home, self.always_on)]
        if [len(shape) for shape in shapes] != [2, 1, 2] or len(self.neurons) != len(self.home):
            raise ContractError(f"pool partition shapes {', '.join(map(str, shapes))}")
        if len(self.home) and (self.home.diff() < 0).any() | (self.home[0] < 0) | (self.home[-1] >= self.layers):
            raise ContractError(f"home layers do not ascend within 0..{self.layers - 1}", where="pool partition")
        for layer in range(self.layers):
            check_layer(self.neurons_of(layer), self.always_on[layer], self.width, f"pool partition, layer {layer}")

    @property
    def layers(self) -> int:
        """L."""
        return len(self.always_on)

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """L, E, N, S, F."""
        return (self.layers, *self.neurons.shape, self.always_on.shape[1], self.width)

    @property
    def given(self) -> list[int]:
        """Experts that every layer gives to the pool."""
        counts: list[int] = self.home.long().bincount(minlength=self.layers).tolist()
        return counts

    def neurons_of(self, layer: int) -> Tensor:
        """(e, N) neurons of the experts that the layer gives."""
        return self.neurons[self.home == layer]

    @property
    def multiplicity(self) -> Tensor:
        """(L, F) int64: how many experts hold the neuron; 0 for always-on and dropped neurons."""
        counts = [
            self.neurons_of(layer).flatten().long().bincount(minlength=self.width) for layer in range(self.layers)
        ]
        return torch.stack(counts)


def load_partition(folder: Path, shape: MoEShape) -> Partition | PoolPartition:
    """The partition of a shape's topology. Raises ContractError."""
    return PoolPartition.load(folder) if shape.pooled else Partition.load(folder)


@dataclass(frozen=True)
class Routers(TensorFile):
    """One linear router per layer: the K experts of highest x @ rowsᵀ + bias."""

    VERSION: ClassVar[int] = 3
    FILE: ClassVar[str] = "routers.safetensors"

    rows: Tensor  # (L, E, D) float32, rounded to the checkpoint's number format
    bias: Tensor  # (L, E) float32; 0 where the target has none
    logit_std: float  # standard deviation of a token's logits over experts on the calibration text

    @classmethod
    def of(cls, layers: Sequence[LinearRouter], dtype: torch.dtype, logit_std: float) -> "Routers":
        """One router per layer, rounded as a checkpoint of that number format rounds them."""
        kept = [rounded(router.to("cpu"), dtype) for router in layers]
        rows_LED, bias_LE = (torch.stack(parts) for parts in zip(*((r.rows_ED, r.bias_E) for r in kept), strict=True))
        return cls(rows_LED, bias_LE, logit_std)

    def layer(self, index: int) -> LinearRouter:
        """The router of one layer."""
        return LinearRouter(self.rows[index], self.bias[index])
