"""A dense FFN of which every token sees only some neurons: the carve in neuron space.

y(x) = Σ_j c_j(x)·h_j(x)·w_j, with c_j the number of active copies of neuron j. Copies of a neuron share its down
column, so one F × D matrix describes every partition, replicated or not, and costs one dense FFN to run.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from models.experts import Block
from models.ffn import DenseFFN
from models.routing import LinearRouter, active_copies, choose_experts, membership

Copies = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class CarvedFFN:
    """`copies(x_TD, h_TF)` gives the active copies (T, F); `down_DF` the neurons' columns."""

    ffn: DenseFFN
    copies: Copies
    down_DF: Tensor

    @property
    def width(self) -> int:
        """F."""
        return self.ffn.width

    def run(self, x_TD: Float[Tensor, "T D"]) -> tuple[list[Block], Float[Tensor, "T D"]]:
        """c_j(x)·h_j(x) of all neurons, and the output."""
        features_TF = self.features(x_TD)
        everyone, neurons_F = (torch.arange(count, device=x_TD.device) for count in features_TF.shape)
        return [Block(everyone, neurons_F, features_TF)], features_TF @ self.down_DF.T

    def __call__(self, x_TD: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
        """The carved FFN's output."""
        return self.features(x_TD) @ self.down_DF.T

    def features(self, x_TD: Float[Tensor, "T D"]) -> Float[Tensor, "T F"]:
        """c_j(x)·h_j(x) of all neurons."""
        h_TF = self.ffn.hidden(x_TD)
        return h_TF * self.copies(x_TD, h_TF)

    def with_change(self, change_DF: Float[Tensor, "D F"]) -> "CarvedFFN":
        """The same with other down columns."""
        return replace(self, down_DF=self.down_DF + change_DF)


def static_copies(kept_J: Int[Tensor, "J"], width: int) -> Copies:
    """The same neurons for every token: a mask, no routing."""
    mask_F = torch.zeros(width, device=kept_J.device)
    mask_F[kept_J.long()] = 1.0
    return lambda _x, h_TF: mask_F.expand_as(h_TF)


def routed_copies(
    neurons_EN: Int[Tensor, "E N"], always_S: Int[Tensor, "S"], width: int, top_k: int, router: LinearRouter
) -> Copies:
    """The K experts of highest router logit, and the always-on neurons."""
    member_EF = membership(neurons_EN, width)
    return lambda x_TD, _h: active_copies(router.choose(x_TD, top_k), member_EF, always_S)


def oracle_copies(ffn: DenseFFN, neurons_EN: Int[Tensor, "E N"], always_S: Int[Tensor, "S"], top_k: int) -> Copies:
    """The K experts whose outputs are largest in norm, seen before choosing: no router can know this."""
    member_EF, grams_ENN = membership(neurons_EN, ffn.width), expert_grams(ffn, neurons_EN)
    return lambda _x, h_TF: active_copies(
        choose_experts(output_norms(grams_ENN, h_TF, neurons_EN), top_k), member_EF, always_S
    )


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


def replica_scale(copies: Copies, ffn: DenseFFN, inputs: Iterable[Tensor]) -> Float[Tensor, "F"]:
    """Σ_t c_j / Σ_t c_j²: the least-squares constant for a neuron that may be active more than once.

    1 where a neuron is never active twice, 1/multiplicity where all experts are on.
    """
    first_F = torch.zeros(ffn.width, dtype=torch.float64, device=ffn.down_DF.device)
    second_F = torch.zeros_like(first_F)
    for x_TD in inputs:
        copies_TF = copies(x_TD, ffn.hidden(x_TD)).double()
        first_F += copies_TF.sum(0)
        second_F += copies_TF.square().sum(0)
    return torch.where(second_F > 0, first_F / second_F.clamp_min(1), 1.0).float()


def neuron_contributions(ffn: DenseFFN, h_TF: Float[Tensor, "T F"]) -> Float[Tensor, "T F"]:
    """|h_j|·‖d_j‖: the norm of what the neuron adds to the output."""
    column_norms_F: Tensor = ffn.down_DF.norm(dim=0)
    return h_TF.abs() * column_norms_F


def expert_contributions(
    ffn: DenseFFN, h_TF: Float[Tensor, "T F"], member_EF: Float[Tensor, "E F"]
) -> Float[Tensor, "T E"]:
    """Σ_{i∈e} |h_i|·‖d_i‖ of every expert."""
    return neuron_contributions(ffn, h_TF) @ member_EF.T
