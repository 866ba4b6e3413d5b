"""Which experts a token goes to, and what that means for every unit."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class LinearRouter:
    """Logits x @ rowsᵀ + bias. The bias takes part in the choice, never in the gates; zeros where there is none."""

    rows_ED: Tensor
    bias_E: Tensor

    @classmethod
    def without_bias(cls, rows_ED: Float[Tensor, "E D"]) -> "LinearRouter":
        """Rows alone."""
        return cls(rows_ED, rows_ED.new_zeros(len(rows_ED)))

    @property
    def experts(self) -> int:
        """E."""
        return len(self.rows_ED)

    def logits(self, x_TD: Float[Tensor, "T D"]) -> Float[Tensor, "T E"]:
        """What the choice is made by."""
        return torch.addmm(self.bias_E, x_TD, self.rows_ED.T)

    def choose(self, x_TD: Float[Tensor, "T D"], top_k: int) -> Int[Tensor, "T K"]:
        """The K experts of every token."""
        return choose_experts(self.logits(x_TD), top_k)

    def to(self, device: torch.device | str) -> "LinearRouter":
        """The same on another device."""
        return LinearRouter(self.rows_ED.to(device), self.bias_E.to(device))


def rounded(router: LinearRouter, dtype: torch.dtype) -> LinearRouter:
    """What is left of a router in a checkpoint of this number format; a bias is kept in fp32."""
    return LinearRouter(router.rows_ED.to(dtype).float(), router.bias_E.float())


def choose_experts(logits_TE: Float[Tensor, "T E"], top_k: int) -> Int[Tensor, "T K"]:
    """The K experts of highest logit."""
    return logits_TE.topk(top_k, dim=1).indices


def chosen_mask(chosen_TK: Int[Tensor, "T K"], experts: int) -> Float[Tensor, "T E"]:
    """1 where the token goes to the expert."""
    rows_TE = torch.zeros(len(chosen_TK), experts, device=chosen_TK.device)
    return rows_TE.scatter_(1, chosen_TK, 1.0)


def has_copies(units_EN: Int[Tensor, "E N"]) -> bool:
    """Whether some unit stands in more than one expert."""
    return bool(units_EN.flatten().bincount().max() > 1)


def membership(units_EN: Int[Tensor, "E N"], width: int) -> Float[Tensor, "E F"]:
    """1 where the expert holds the unit."""
    rows_EF = torch.zeros(len(units_EN), width, device=units_EN.device)
    return rows_EF.scatter_(1, units_EN.long(), 1.0)


def active_copies(
    chosen_TK: Int[Tensor, "T K"], member_EF: Float[Tensor, "E F"], always_S: Int[Tensor, "S"]
) -> Float[Tensor, "T F"]:
    """How many copies of each unit are active for each token; 1 for always-on units."""
    copies_TF = chosen_mask(chosen_TK, len(member_EF)) @ member_EF
    copies_TF[:, always_S.long()] = 1.0
    return copies_TF
