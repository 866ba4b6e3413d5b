"""scan, layers, score, cluster, assemble → later stages: statistics and scores of neurons, experts, routers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from instruments.errors import ContractError
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
    def own(self) -> Tensor:
        """(L, F) whether the layer has the neuron: zero neurons fill narrow layers."""
        own_LF = self.weight_norm_down > 0
        return own_LF | ~own_LF.any(1, keepdim=True)

    @property
    def contribution(self) -> Tensor:
        """(L, F) fp32 mean |h_j|·‖d_j‖: mean norm of what the neuron adds to the residual stream."""
        return (self.sum_abs / self.tokens * self.weight_norm_down).float()

    @property
    def frequency(self) -> Tensor:
        """(L, F) fp32 share of tokens where the neuron is among the most active."""
        return (self.active_count / self.tokens).float()


@dataclass(frozen=True)
class LayerCosts(TensorFile):
    """KL(dense ‖ dense with one layer narrowed) per token, nats."""

    VERSION: ClassVar[int] = 1
    FILE: ClassVar[str] = "costs.safetensors"

    active: float  # share of neurons kept in the first row; the second keeps `NARROWER` times as many
    divergence: Tensor  # (2, L) float64


@dataclass(frozen=True)
class Scores(TensorFile):
    """(L, F) float32 scores; higher is more important, comparable within a layer only."""

    VERSION: ClassVar[int] = 2
    FILE: ClassVar[str] = "scores.safetensors"

    method: str  # score.method
    description: str  # in words; says so if the gradient term is missing
    chosen: Tensor


@dataclass(frozen=True)
class Partition(TensorFile):
    """Neurons of every expert and the always-on neurons of every layer, both sorted.

    A neuron is always on, or in one or more experts (never twice in one), or dropped. The experts of a layer are cut
    from it, those of a pool serve all layers. A layer that stays dense has no experts; its row of `always_on` has no
    meaning.
    """

    VERSION: ClassVar[int] = 3
    FILE: ClassVar[str] = "partition.safetensors"

    width: int  # F
    neurons: Tensor  # (P, N) int32: the experts of all layers, in the layer they were cut from
    home: Tensor  # (P,) int32, the layer an expert was cut from; ascends
    always_on: Tensor  # (L, S) int32
    pooled: bool = False  # all layers share the experts
    description: str = ""  # how it was made, in a sentence

    def __post_init__(self) -> None:
        shapes = [tuple(tensor.shape) for tensor in (self.neurons, self.home, self.always_on)]
        if [len(shape) for shape in shapes] != [2, 1, 2] or len(self.neurons) != len(self.home):
            raise ContractError(f"partition shapes {', '.join(map(str, shapes))}")
        if len(self.home) and (self.home.diff() < 0).any() | (self.home[0] < 0) | (self.home[-1] >= self.layers):
            raise ContractError(f"home layers do not ascend within 0..{self.layers - 1}", where="partition")
        for layer in self.carved_layers:
            self._check_layer(layer)

    def _check_layer(self, layer: int) -> None:
        neurons_EN, always_S, where = self.neurons_of(layer), self.always_on[layer], f"partition, layer {layer}"
        used = torch.cat([neurons_EN.flatten(), always_S])
        if len(used) and (used.min() < 0 or used.max() >= self.width):
            raise ContractError(f"neuron index outside 0..{self.width - 1}", where=where)
        if any(len(row.unique()) != len(row) for row in [*neurons_EN, always_S]):
            raise ContractError("a neuron is twice in one expert", where=where)
        if torch.isin(neurons_EN, always_S).any():
            raise ContractError("an always-on neuron is also in an expert", where=where)

    @property
    def layers(self) -> int:
        """Number of layers L."""
        return len(self.always_on)

    @property
    def given(self) -> list[int]:
        """Number of experts cut from each layer."""
        return [*map(int, self.home.long().bincount(minlength=self.layers))]

    @property
    def carved_layers(self) -> list[int]:
        """The layers that do not stay dense."""
        return [layer for layer, given in enumerate(self.given) if given or self.pooled]

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """L, E, N, S, F."""
        experts = len(self.neurons) if self.pooled else max(self.given)
        return self.layers, experts, self.neurons.shape[1], self.always_on.shape[1], self.width

    def neurons_of(self, layer: int) -> Tensor:
        """(e, N) neurons of the experts cut from the layer."""
        return self.neurons[self.home == layer]

    def routed(self, layer: int) -> Tensor:
        """(E, N) neurons of the experts that the layer's router chooses from."""
        return self.neurons if self.pooled else self.neurons_of(layer)

    @property
    def multiplicity(self) -> Tensor:
        """(l, F) int64 for the carved layers: number of experts that hold the neuron; 0 if always on or dropped."""
        held = (self.neurons_of(layer).flatten().long() for layer in self.carved_layers)
        return torch.stack([neurons_P.bincount(minlength=self.width) for neurons_P in held])

    @property
    def dropped(self) -> int:
        """Number of neurons of the carved layers that are neither in an expert nor always on."""
        return int((self.multiplicity == 0).sum()) - len(self.carved_layers) * self.always_on.shape[1]


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
