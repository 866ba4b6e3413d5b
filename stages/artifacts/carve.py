"""scan, score, cluster, assemble → later stages: statistics and scores of neurons, neurons of experts, routers."""

from collections.abc import Mapping
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
class NeuronStatistics(TensorFile):
    """Sums over unmasked tokens and per-sample gradient norms, per layer and neuron.

    All (L, F) sums are float64. Means are activation sums and `sum_taylor` divided by `tokens`, gradient norms divided
    by `samples`. A forward-only scan has `samples_with_gradient == 0` and zeros in the gradient fields.
    """

    VERSION: ClassVar[int] = 2
    FILE: ClassVar[str] = "statistics.safetensors"

    tokens: int
    samples: int
    samples_with_gradient: int
    mean_loss: float
    # Activations h_j of the forward pass.
    sum_abs: Tensor  # (L, F) Σ|h|
    sum_sq: Tensor  # (L, F) Σh²
    max_abs: Tensor  # (L, F) max|h|
    active_count: Tensor  # (L, F) int64: tokens where the neuron is among the token's most active
    # Gradients of each sample's mean loss.
    sum_taylor: Tensor  # (L, F) Σ|h·∂loss/∂h|
    grad_norm_gate: Tensor  # (L, F) Σ over samples of ‖∇gate row‖
    grad_norm_up: Tensor  # (L, F) Σ over samples of ‖∇up row‖
    grad_norm_down: Tensor  # (L, F) Σ over samples of ‖∇down column‖
    weight_norm_down: Tensor  # (L, F) float32: norms of the down columns
    # Reservoir of R tokens: bit r of neuron j = active at reservoir token r; in the bit order of np.packbits.
    active_bits: Tensor  # (L, F, ceil(R / 8)) uint8
    reservoir_tokens: int

    @property
    def contribution(self) -> Tensor:
        """(L, F) fp32 mean |h_j|·‖d_j‖: mean norm of what the neuron adds to the residual stream."""
        return (self.sum_abs / self.tokens * self.weight_norm_down).float()

    @property
    def frequency(self) -> Tensor:
        """(L, F) fp32 share of tokens where the neuron is among the most active."""
        return (self.active_count / self.tokens).float()


@dataclass(frozen=True)
class Scores(TensorFile):
    """(L, F) float32 scores; higher is more important, comparable within a layer only."""

    VERSION: ClassVar[int] = 2
    FILE: ClassVar[str] = "scores.safetensors"

    method: str  # score.method
    description: str  # in words; says so if the gradient term is missing
    chosen: Tensor


class _Layers(TensorFile):
    """What the partitions of both topologies share."""

    width: int  # F
    neurons: Tensor  # int32, sorted within an expert
    always_on: Tensor  # (L, S) int32, sorted
    description: str  # how it was made, in a sentence

    @property
    def layers(self) -> int:
        """Number of layers L."""
        return len(self.always_on)

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """L, E, N, S, F."""
        experts, n = self.neurons.shape[-2:]
        return self.layers, experts, n, self.always_on.shape[1], self.width

    @property
    def carved_layers(self) -> list[int]:
        """The layers that do not stay dense."""
        return [*range(self.layers)]

    def neurons_of(self, layer: int) -> Tensor:
        """(e, N) neurons of the experts cut from the layer."""
        return self.neurons[layer]

    @property
    def multiplicity(self) -> Tensor:
        """(l, F) int64 for the carved layers: number of experts that hold the neuron; 0 if always on or dropped."""
        held = (self.neurons_of(layer).flatten().long() for layer in self.carved_layers)
        return torch.stack([neurons_P.bincount(minlength=self.width) for neurons_P in held])

    @property
    def dropped(self) -> int:
        """Number of neurons of the carved layers that are neither in an expert nor always on."""
        return int((self.multiplicity == 0).sum()) - len(self.carved_layers) * self.always_on.shape[1]

    def check_layers(self, name: str) -> None:
        """Raise ContractError if the experts and always-on neurons of a layer are no valid partition."""
        for layer in self.carved_layers:
            neurons_EN, always_S, where = self.neurons_of(layer), self.always_on[layer], f"{name}, layer {layer}"
            used = torch.cat([neurons_EN.flatten(), always_S])
            if len(used) and (used.min() < 0 or used.max() >= self.width):
                raise ContractError(f"neuron index outside 0..{self.width - 1}", where=where)
            if any(len(row.unique()) != len(row) for row in [*neurons_EN, always_S]):
                raise ContractError("a neuron is twice in one expert", where=where)
            if torch.isin(neurons_EN, always_S).any():
                raise ContractError("an always-on neuron is also in an expert", where=where)


STAYS_DENSE = -1  # in place of every neuron of a layer that stays dense


@dataclass(frozen=True)
class Partition(_Layers):
    """Neurons of every expert, sorted within the expert, and the always-on neurons, sorted.

    A neuron is always on, or in one or more experts (never twice in one), or dropped. Layers that stay dense have
    STAYS_DENSE everywhere.
    """

    VERSION: ClassVar[int] = 2
    FILE: ClassVar[str] = "partition.safetensors"

    width: int  # F
    neurons: Tensor  # (L, E, N) int32
    always_on: Tensor  # (L, S) int32
    description: str = ""

    def __post_init__(self) -> None:
        if self.neurons.ndim != 3 or self.always_on.ndim != 2 or len(self.neurons) != len(self.always_on):
            raise ContractError(f"partition shapes {tuple(self.neurons.shape)} and {tuple(self.always_on.shape)}")
        self.check_layers("partition")

    @property
    def carved_layers(self) -> list[int]:
        """The layers that do not stay dense."""
        return [layer for layer, neurons_EN in enumerate(self.neurons) if not bool((neurons_EN == STAYS_DENSE).all())]


@dataclass(frozen=True)
class PoolPartition(_Layers):
    """The partition of a pool: all layers share the experts; the neurons of one expert come from one layer."""

    VERSION: ClassVar[int] = 1
    FILE: ClassVar[str] = "pool_partition.safetensors"

    width: int  # F
    neurons: Tensor  # (E, N) int32, in the expert's home layer
    home: Tensor  # (E,) int32, the layer an expert was cut from; ascends
    always_on: Tensor  # (L, S) int32
    description: str = ""

    def __post_init__(self) -> None:
        shapes = [tuple(tensor.shape) for tensor in (self.neurons, self.home, self.always_on)]
        if [len(shape) for shape in shapes] != [2, 1, 2] or len(self.neurons) != len(self.home):
            raise ContractError(f"pool partition shapes {', '.join(map(str, shapes))}")
        if len(self.home) and (self.home.diff() < 0).any() | (self.home[0] < 0) | (self.home[-1] >= self.layers):
            raise ContractError(f"home layers do not ascend within 0..{self.layers - 1}", where="pool partition")
        self.check_layers("pool partition")

    @property
    def given(self) -> list[int]:
        """Number of experts in the pool from each layer."""
        return [*map(int, self.home.long().bincount(minlength=self.layers))]

    def neurons_of(self, layer: int) -> Tensor:
        """(e, N) neurons of the pool's experts from this layer."""
        return self.neurons[self.home == layer]


def load_partition(folder: Path, shape: MoEShape) -> Partition | PoolPartition:
    """Read the partition; its class follows from the shape's topology. Raises ContractError."""
    return PoolPartition.load(folder) if shape.pooled else Partition.load(folder)


@dataclass(frozen=True)
class Routers(TensorFile):
    """One linear router per layer; it chooses the K experts with the highest x @ rowsᵀ + bias.

    Layers that stay dense have zeros.
    """

    VERSION: ClassVar[int] = 3
    FILE: ClassVar[str] = "routers.safetensors"

    rows: Tensor  # (L, E, D) float32, rounded to the checkpoint's number format
    bias: Tensor  # (L, E) float32; 0 where the target has none
    logit_std: float  # standard deviation of a token's logits over experts on the calibration text

    @classmethod
    def of(cls, routers: Mapping[int, LinearRouter], layers: int, dtype: torch.dtype, logit_std: float) -> "Routers":
        """Stack the routers by layer, rounded as a checkpoint in `dtype` rounds them; zeros for layers without one."""
        unused = LinearRouter.without_bias(torch.zeros_like(next(iter(routers.values())).rows_ED))
        kept = [rounded(routers.get(layer, unused).to("cpu"), dtype) for layer in range(layers)]
        rows_LED, bias_LE = (torch.stack(parts) for parts in zip(*((r.rows_ED, r.bias_E) for r in kept), strict=True))
        return cls(rows_LED, bias_LE, logit_std)

    def layer(self, index: int) -> LinearRouter:
        """The router of one layer."""
        return LinearRouter(self.rows[index], self.bias[index])
