"""scan → score → cluster: statistics of each neuron on the calibration text, and its score."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

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
