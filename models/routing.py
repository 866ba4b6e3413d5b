"""Choose experts for tokens, and compute their gates."""

from dataclasses import dataclass
from enum import StrEnum

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class LinearRouter:
    """Logits x @ rowsᵀ + bias. The bias affects the choice, never the gates; zeros where there is none."""

    rows_ED: Tensor
    bias_E: Tensor

    @classmethod
    def without_bias(cls, rows_ED: Float[Tensor, "E D"]) -> "LinearRouter":
        """A router with a bias of zeros."""
        return cls(rows_ED, rows_ED.new_zeros(len(rows_ED)))

    @property
    def experts(self) -> int:
        """E."""
        return len(self.rows_ED)

    def logits(self, x_TD: Float[Tensor, "T D"]) -> Float[Tensor, "T E"]:
        """Logits with the bias; the experts with the highest are chosen."""
        return torch.addmm(self.bias_E, x_TD, self.rows_ED.T)

    def choose(self, x_TD: Float[Tensor, "T D"], top_k: int) -> Int[Tensor, "T K"]:
        """The K experts of every token."""
        return choose_experts(self.logits(x_TD), top_k)

    def to(self, device: torch.device | str) -> "LinearRouter":
        """The same router on another device."""
        return LinearRouter(self.rows_ED.to(device), self.bias_E.to(device))


def rounded(router: LinearRouter, dtype: torch.dtype) -> LinearRouter:
    """The router as a checkpoint of this number format holds it, contiguous; a bias is kept in fp32."""
    return LinearRouter(router.rows_ED.to(dtype).float().contiguous(), router.bias_E.float())


def choose_experts(logits_TE: Float[Tensor, "T E"], top_k: int) -> Int[Tensor, "T K"]:
    """The K experts of highest logit."""
    return logits_TE.topk(top_k, dim=1).indices


def chosen_mask(chosen_TK: Int[Tensor, "T K"], experts: int) -> Float[Tensor, "T E"]:
    """1 where the token goes to the expert, else 0."""
    rows_TE = torch.zeros(len(chosen_TK), experts, device=chosen_TK.device)
    return rows_TE.scatter_(1, chosen_TK, 1.0)


def count_choices(chosen_TK: Int[Tensor, "T K"], experts: int) -> Int[Tensor, "E"]:
    """Number of tokens that chose each expert; for `bincount` a GPU's host would wait."""
    chosen_P = chosen_TK.flatten()
    return chosen_P.new_zeros(experts).scatter_add_(0, chosen_P, torch.ones_like(chosen_P))


def has_copies(neurons_EN: Int[Tensor, "*E N"]) -> bool:
    """Whether some neuron is in more than one expert."""
    sorted_P = neurons_EN.flatten().sort().values  # `bincount` would make a GPU's host wait more often
    return bool((sorted_P[1:] == sorted_P[:-1]).any())


def membership(neurons_EN: Int[Tensor, "E N"], width: int) -> Float[Tensor, "E F"]:
    """1 where the expert holds the neuron, else 0."""
    rows_EF = torch.zeros(len(neurons_EN), width, device=neurons_EN.device)
    return rows_EF.scatter_(1, neurons_EN.long(), 1.0)


def active_copies(
    chosen_TK: Int[Tensor, "T K"], member_EF: Float[Tensor, "E F"], always_S: Int[Tensor, "S"]
) -> Float[Tensor, "T F"]:
    """How many copies of each neuron are active for each token; 1 for always-on neurons."""
    copies_TF = chosen_mask(chosen_TK, len(member_EF)) @ member_EF
    copies_TF[:, always_S.long()] = 1.0
    return copies_TF


class GateKind(StrEnum):
    """How an architecture turns router logits into gates."""

    CONSTANT = "constant"  # always 1: an idealisation, no architecture
    SOFTMAX_OF_CHOSEN = "softmax_of_chosen"  # over the K chosen, which equals over all and renormalised
    SOFTMAX_OF_ALL = "softmax_of_all"  # over all E, not renormalised
    SIGMOID_OF_CHOSEN = "sigmoid_of_chosen"  # renormalised over the K chosen
    SIGMOID = "sigmoid"  # not renormalised


# Standard deviation of router logits that keeps the routing in training and bf16 at almost no cost: at 1, a softmax
# gives one token's experts too different gates. Rounding errors are relative to the logits for a softmax, to ½ for a
# sigmoid.
LOGIT_STD = {kind: 0.3 if kind.startswith("softmax") else 1.0 for kind in GateKind}


def masked_gates(
    kind: GateKind, logits_TE: Float[Tensor, "T E"], mask_TE: Float[Tensor, "T E"]
) -> Float[Tensor, "T E"]:
    """Gates of all experts, up to a constant factor; `mask_TE` is 1 for chosen experts, 0 for others, or between."""
    match kind:
        case GateKind.CONSTANT:
            return logits_TE.new_ones(logits_TE.shape)
        case GateKind.SOFTMAX_OF_ALL:
            return logits_TE.softmax(1)
        case GateKind.SIGMOID:
            return logits_TE.sigmoid()
        case GateKind.SOFTMAX_OF_CHOSEN:
            scores_TE = logits_TE.softmax(1)
        case GateKind.SIGMOID_OF_CHOSEN:
            scores_TE = logits_TE.sigmoid()
    return scores_TE / (scores_TE * mask_TE).sum(1, keepdim=True)


def relative_gates(
    kind: GateKind, logits_TE: Float[Tensor, "T E"], chosen_TK: Int[Tensor, "T K"]
) -> Float[Tensor, "T K"]:
    """Gates of the chosen experts times the checkpoint's gate scale: all 1 if the logits are equal."""
    chosen_logits_TK = logits_TE.gather(1, chosen_TK)
    match kind:
        case GateKind.CONSTANT:
            return chosen_logits_TK.new_ones(chosen_logits_TK.shape)
        case GateKind.SOFTMAX_OF_CHOSEN:
            return chosen_logits_TK.softmax(1) * chosen_TK.shape[1]
        case GateKind.SOFTMAX_OF_ALL:
            return logits_TE.softmax(1).gather(1, chosen_TK) * logits_TE.shape[1]
        case GateKind.SIGMOID_OF_CHOSEN:
            scores_TK = chosen_logits_TK.sigmoid()
            return scores_TK / scores_TK.sum(1, keepdim=True) * chosen_TK.shape[1]
        case GateKind.SIGMOID:
            return chosen_logits_TK.sigmoid() * 2
