"""scan → score → cluster: what each neuron did on the calibration text, and how much it matters."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from stages.artifacts.tensor_file import load_contract, save_contract


@dataclass(frozen=True)
class NeuronStatistics:
    """Sums over unmasked tokens and per-sample gradient norms, per layer and neuron.

    All (L, F) sums are float64. Divide activation sums by `tokens` and gradient sums by `samples`. A forward-only scan
    has `samples_with_gradient == 0` and zeros in the gradient fields.
    """

    VERSION: ClassVar[int] = 1
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
    # Weights of the neuron.
    weight_norm_gate: Tensor  # (L, F) float32
    weight_norm_up: Tensor  # (L, F) float32
    weight_norm_down: Tensor  # (L, F) float32
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

    def save(self, folder: Path) -> None:
        """Write `folder/statistics.safetensors`."""
        save_contract(self, folder / self.FILE, version=self.VERSION)

    @classmethod
    def load(cls, folder: Path) -> "NeuronStatistics":
        """Read what `save` wrote. Raises ContractError."""
        return load_contract(cls, folder / cls.FILE, version=cls.VERSION)


@dataclass(frozen=True)
class Scores:
    """(L, F) float32 scores; higher is more important, comparable within a layer only."""

    VERSION: ClassVar[int] = 2
    FILE: ClassVar[str] = "scores.safetensors"

    method: str  # the measure
    description: str  # the same in words, with what it lacks
    chosen: Tensor

    def save(self, folder: Path) -> None:
        """Write `folder/scores.safetensors`."""
        save_contract(self, folder / self.FILE, version=self.VERSION)

    @classmethod
    def load(cls, folder: Path) -> "Scores":
        """Read what `save` wrote. Raises ContractError."""
        return load_contract(cls, folder / cls.FILE, version=cls.VERSION)
