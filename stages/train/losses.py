"""What training minimises: sums over supervised tokens, to be divided by their number in the whole optimizer step."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax, pad
from torch.utils.checkpoint import checkpoint

from stages.data.encoding import IGNORED
from stages.metrics.loss import token_losses

CHUNK_TOKENS = 1024  # whose distributions over the vocabulary are in memory at once, in fp32


def predicts(labels_BT: Int[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
    """Positions whose next token counts."""
    return pad(labels_BT[:, 1:], (0, 1), value=IGNORED) != IGNORED


def next_token_loss(logits_BTV: Float[Tensor, "B T V"], labels_BT: Int[Tensor, "B T"]) -> Float[Tensor, ""]:
    """Σ −log p(next token), in nats."""
    return token_losses(logits_BTV, labels_BT).sum()


def prediction_distance(
    student_BTV: Float[Tensor, "B T V"],
    teacher_BTV: Float[Tensor, "B T V"],
    counts_BT: Bool[Tensor, "B T"],
    temperature: float = 1.0,
) -> Float[Tensor, ""]:
    """Σ KL(teacher ‖ student) of the next-token distributions, times temperature².

    Memory: distributions of `CHUNK_TOKENS` tokens; they are computed again in the backward pass.
    Source: Hinton et al., arXiv:1503.02531, section 2.
    """
    student_tV, teacher_tV = student_BTV[counts_BT], teacher_BTV[counts_BT]
    total = student_tV.new_zeros((), dtype=torch.float32)
    for start in range(0, len(student_tV), CHUNK_TOKENS):
        part = slice(start, start + CHUNK_TOKENS)
        total = total + checkpoint(_divergence, student_tV[part], teacher_tV[part], temperature, use_reentrant=False)
    return total * temperature**2


def _divergence(student_tV: Tensor, teacher_tV: Tensor, temperature: float) -> Tensor:
    ours, theirs = (log_softmax(logits.float() / temperature, -1) for logits in (student_tV, teacher_tV))
    return kl_div(ours, theirs, reduction="sum", log_target=True)


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
