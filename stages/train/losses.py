"""What training minimises: sums over supervised tokens, to be divided by their number in the whole optimizer step."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from stages.data.encoding import IGNORED
from stages.metrics.loss import token_losses


def predicts(labels_BT: Int[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
    """Positions whose next token counts."""
    return pad(labels_BT[:, 1:], (0, 1), value=IGNORED) != IGNORED


def next_token_loss(logits_BTV: Float[Tensor, "B T V"], labels_BT: Int[Tensor, "B T"]) -> Float[Tensor, ""]:
    """Σ −log p(next token), in nats."""
    return token_losses(logits_BTV, labels_BT).sum()


def hidden_distance(
    student: tuple[Tensor, ...], teacher: tuple[Tensor, ...], counts_BT: Bool[Tensor, "B T"]
) -> Float[Tensor, ""]:
    """Σ over tokens of ‖student − teacher‖² / ‖teacher‖², mean over layers; the embedding is left out.

    Args:
        student: hidden states ``(B, T, D)`` before the first layer and after each.
        teacher: the same of the dense model.
        counts_BT: tokens that count.
    """
    layers = list(zip(student[1:], teacher[1:], strict=True))
    distances = [_relative(ours[counts_BT].float(), theirs[counts_BT].float()) for ours, theirs in layers]
    return torch.stack(distances).mean()


def _relative(ours_tD: Tensor, theirs_tD: Tensor) -> Tensor:
    return ((ours_tD - theirs_tD).square().sum(1) / theirs_tD.square().sum(1).clamp_min(1e-12)).sum()
