"""How far the predictions of two models lie apart."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax
from torch.utils.checkpoint import checkpoint

CHUNK_TOKENS = 1024  # whose distributions over the vocabulary are in memory at once, in fp32


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
