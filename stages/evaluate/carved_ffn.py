"""A dense FFN of which every token sees only some neurons: a baseline in neuron space.

y(x) = Σ_j c_j(x)·h_j(x)·w_j, with c_j the number of active copies of neuron j. Copies of a neuron share its down
column, so one F × D matrix describes every partition, replicated or not, and costs one dense FFN to run.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from models.experts import Block
from models.ffn import DenseFFN


@dataclass(frozen=True)
class CarvedFFN:
    """`features(x_TD)` gives c_j(x)·h_j(x) of all neurons (T, F); `down_DF` holds their columns."""

    features: Callable[[Tensor], Tensor]
    down_DF: Tensor

    @property
    def width(self) -> int:
        """F."""
        return self.down_DF.shape[1]

    def run(self, x_TD: Float[Tensor, "T D"]) -> tuple[list[Block], Float[Tensor, "T D"]]:
        """The features of all neurons, and the output."""
        features_TF = self.features(x_TD)
        everyone, neurons_F = (torch.arange(count, device=x_TD.device) for count in features_TF.shape)
        return [Block(everyone, neurons_F, features_TF)], features_TF @ self.down_DF.T

    def __call__(self, x_TD: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
        """The output."""
        return self.features(x_TD) @ self.down_DF.T

    def with_change(self, change_DF: Float[Tensor, "D F"]) -> "CarvedFFN":
        """The same with other down columns, which no feature depends on."""
        return replace(self, down_DF=self.down_DF + change_DF)


MOST_BYTES = 1 << 30  # that one memo keeps; the rest is computed again


class Memo:
    """A function of a tensor whose values are kept by the identity of the tensor, which has to live as long."""

    def __init__(self, compute: Callable[[Tensor], Tensor]) -> None:
        """Nothing is kept yet."""
        self._compute = compute
        self._kept: dict[int, Tensor] = {}
        self._bytes = 0

    def __call__(self, x_TD: Tensor) -> Tensor:
        """The value, kept where there is room."""
        if (known := self._kept.get(id(x_TD))) is not None:
            return known
        value = self._compute(x_TD)
        self.keep(x_TD, value)
        return value

    def keep(self, x_TD: Tensor, value: Tensor) -> None:
        """A value that was computed elsewhere, kept where there is room."""
        if self._bytes + value.nbytes <= MOST_BYTES:
            self._kept[id(x_TD)] = value
            self._bytes += value.nbytes

    def forget(self, x_TD: Tensor) -> None:
        """Make room, where this one's value is kept."""
        value = self._kept.pop(id(x_TD), None)
        self._bytes -= 0 if value is None else value.nbytes


def expert_grams(ffn: DenseFFN, neurons_EN: Int[Tensor, "E N"]) -> Float[Tensor, "E N N"]:
    """d_i·d_j within every expert."""
    columns_END = ffn.down_DF.T[neurons_EN.long()]
    return columns_END @ columns_END.mT


def output_norms(
    grams_ENN: Float[Tensor, "E N N"], h_TF: Float[Tensor, "T F"], neurons_EN: Int[Tensor, "E N"]
) -> Float[Tensor, "T E"]:
    """‖Σ_{i∈e} h_i·d_i‖ of every expert, as sqrt(h_eᵀ·Gram_e·h_e): N columns instead of D."""
    norms_TE = h_TF.new_empty(len(h_TF), len(neurons_EN))
    for expert, (gram_NN, neurons_N) in enumerate(zip(grams_ENN, neurons_EN.long(), strict=True)):
        h_TN = h_TF.index_select(1, neurons_N)
        norms_TE[:, expert] = torch.linalg.vecdot(h_TN @ gram_NN, h_TN)
    return norms_TE.clamp_min_(0).sqrt_()
