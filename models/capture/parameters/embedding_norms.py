"""Squared norms of an embedding's weight gradient, by sample and column, tied to the output or not.

Row v of an embedding's gradient is A_v = Σ_{t: id_t = v} δ_t. Where the output embedding uses the same weight, its
B = GᵀX adds to that, and ‖A + B‖² = ‖A‖² + ‖B‖² + 2⟨A, B⟩, column by column.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from models.capture.gradient_norms import column_squares


@dataclass(frozen=True)
class HeadPart:
    """What the output embedding contributes, kept until the backward pass reaches the input."""

    x_BSD: Tensor  # its input; S may be less than T
    at_inputs_BTS: Tensor  # G[s, id_t]: gradient of the logits at the tokens that were looked up
    columns_BD: Tensor  # ‖B[:, d]‖²
    token_squares_BS: Tensor | None  # ‖g_s‖²·‖x_s‖²

    def to(self, device: torch.device) -> "HeadPart":
        """The same on another device: of a model spread over several, the embedding may lie apart from the output."""
        tokens = None if self.token_squares_BS is None else self.token_squares_BS.to(device)
        return HeadPart(self.x_BSD.to(device), self.at_inputs_BTS.to(device), self.columns_BD.to(device), tokens)


def head_part(
    x_BSD: Float[Tensor, "B S D"],
    grad_BSV: Float[Tensor, "B S V"],
    ids_BT: Int[Tensor, "B T"],
    *,
    gram: bool,
    per_token: bool = False,
) -> HeadPart:
    """Reduce the gradient of the logits to what the sum of both uses needs."""
    at_inputs = grad_BSV.gather(2, ids_BT.unsqueeze(1).expand(-1, grad_BSV.shape[1], -1)).mT.float()
    tokens = None
    if per_token:
        tokens = (_norms(grad_BSV) * _norms(x_BSD)).square_()
    return HeadPart(x_BSD, at_inputs, column_squares(x_BSD, grad_BSV, gram=gram), tokens)


def lookup_columns(ids_BT: Int[Tensor, "B T"], delta_BTD: Float[Tensor, "B T D"]) -> Float[Tensor, "B D"]:
    """‖A[:, d]‖² for every sample: gradients of equal tokens are added before they are squared.

    Sorting brings equal tokens together without asking the device how many different ones there are.
    """
    sorted_BT, order_BT = ids_BT.sort(dim=1)
    row_BT = torch.nn.functional.pad((sorted_BT[:, 1:] != sorted_BT[:, :-1]).long(), (1, 0)).cumsum(1)
    # Samples one after the other in one tall matrix.
    row_BT = row_BT + torch.arange(len(row_BT), device=row_BT.device).unsqueeze(1) * row_BT.shape[1]
    ordered = delta_BTD.gather(1, order_BT.unsqueeze(2).expand_as(delta_BTD)).float()
    sums = torch.zeros_like(ordered).flatten(0, 1).index_add_(0, row_BT.flatten(), ordered.flatten(0, 1))
    columns_BD: Tensor = sums.square_().view_as(ordered).sum(1)
    return columns_BD


def embedding_columns(
    ids_BT: Int[Tensor, "B T"], delta_BTD: Float[Tensor, "B T D"], head: HeadPart | None
) -> Float[Tensor, "B D"]:
    """‖∇W[:, d]‖² of the embedding's weight.

    Args:
        ids_BT: tokens looked up.
        delta_BTD: gradient of the rows looked up; zero for a token whose row is not trained (padding_idx).
        head: of the output embedding, where it uses the same weight.
    Numerics: fp32; a square that rounding leaves below zero counts as zero.
    """
    columns_BD = lookup_columns(ids_BT, delta_BTD)
    if head is None:
        return columns_BD
    cross_BD = _sent_back(head).mul_(delta_BTD).sum(1)
    return columns_BD.add_(head.columns_BD).add_(cross_BD, alpha=2).clamp_min_(0)


def embedding_token_squares(delta_BTD: Float[Tensor, "B T D"], head: HeadPart | None) -> Float[Tensor, "B T"]:
    """‖what position t contributes‖²: δ_t in row id_t and, tied, g_t x_tᵀ; S inputs of the head are the last ones."""
    squares_BT = _norms(delta_BTD).square_()
    if head is None or head.token_squares_BS is None:
        return squares_BT
    kept = head.token_squares_BS.shape[1]
    own_BS = head.at_inputs_BTS[:, -kept:].diagonal(dim1=1, dim2=2)
    cross_BS = own_BS * (head.x_BSD.float() * delta_BTD[:, -kept:]).sum(-1)
    squares_BT[:, -kept:] += head.token_squares_BS + 2 * cross_BS
    return squares_BT.clamp_min_(0)


def _sent_back(head: HeadPart) -> Tensor:
    """B_{id_t}, the row of the output embedding's gradient at every token looked up: (B, T, D)."""
    return head.at_inputs_BTS @ head.x_BSD.float()


def _norms(x_BTN: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(x_BTN, dim=-1, dtype=torch.float32)
    return norms
