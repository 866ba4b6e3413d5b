"""Which experts a token goes to, and what that means for every unit."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def choose_experts(logits_TE: Float[Tensor, "T E"], top_k: int) -> Int[Tensor, "T K"]:
    """The K experts of highest logit."""
    return logits_TE.topk(top_k, dim=1).indices


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
    copies_TF = torch.zeros(len(chosen_TK), member_EF.shape[1], device=member_EF.device)
    for chosen_T in chosen_TK.unbind(1):
        copies_TF += member_EF[chosen_T]
    copies_TF[:, always_S.long()] = 1.0
    return copies_TF
