"""scan → score → cluster: what each neuron did on the calibration text, and how much it matters."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from stages.artifacts.tensor_file import TensorFile


@dataclass(frozen=True)
class NeuronStatistics(TensorFile):
    """Sums over unmasked tokens and per-sample gradient norms, per layer and neuron.

    All (L, F) sums are float64. Divide activation sums by `tokens` and gradient sums by `samples`. A forward-only scan
    has `samples_with_gradient == 0` and zeros in the gradient fields.
    """

    VERSION: ClassVar[int] = 2
    FILE: ClassVar[str] = "statistics.safetensors"

    tokens: int
    samples: int
    samples_with_gradient: int
    mean_loss: float
    # Activation h_j, forward.
    sum_abs: Tensor  # (L, F) Σ|h|
    sum_sq: Tensor  # (L, F) Σh²
    max_abs: Tensor  # (L, F) max|h|
    active_count: Tensor  # (L, F) int64: tokens where the neuron is among the token's most active
    # Gradient, per-sample mean loss.
    sum_taylor: Tensor  # (L, F) Σ|h·∂loss/∂h|
    grad_norm_gate: Tensor  # (L, F) Σ over samples of ‖∇gate row‖
    grad_norm_up: Tensor  # (L, F) Σ over samples of ‖∇up row‖
    grad_norm_down: Tensor  # (L, F) Σ over samples of ‖∇down column‖
    weight_norm_down: Tensor  # (L, F) float32: norms of the down columns
    # Reservoir of R tokens: bit r of neuron j = active at reservoir token r. np.packbits order (most significant
    # first).
    active_bits: Tensor  # (L, F, ceil(R / 8)) uint8
    reservoir_tokens: int

    @property
    def contribution(self) -> Tensor:
        """(L, F) fp32 mean |h_j|·‖d_j‖: how long a vector the neuron adds to the residual stream."""
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

    method: str  # the measure
    description: str  # the same in words, with what it lacks
    chosen: Tensor
