"""Cross-entropy over a large vocabulary, a few tokens at a time."""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from stages.data.encoding import IGNORED

CHUNK_VALUES = 2**22  # logits whose probabilities are in memory at once, 16 MiB in fp32


def cross_entropy(
    logits_NV: Float[Tensor, "N V"], targets_N: Int[Tensor, "N"], *, spend: bool = False
) -> Float[Tensor, "N"]:
    """−log p(target) in nats, fp32; 0 where the target is ignored (-100).

    Torch's own holds three tensors of the logits' size in the backward pass, most of the memory of a batch. Here it
    is two, and with `spend` one.

    Args:
        logits_NV: of any floating-point format.
        targets_N: token ids.
        spend: the gradient is written over the logits. Only where nobody reads them again; an operation of the model
            that would, in its own backward pass, fails (autograd counts the versions of its tensors).
    """
    losses_N: Tensor = _CrossEntropy.apply(logits_NV, targets_N, spend)  # type: ignore[no-untyped-call]
    return losses_N


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, spend: bool) -> Tensor:  # noqa: ANN401 - autograd's context
        ctx.save_for_backward(logits_NV, targets_N)
        ctx.spend = spend
        losses = [
            functional.cross_entropy(logits_NV[rows].float(), targets_N[rows], ignore_index=IGNORED, reduction="none")
            for rows in _chunks(logits_NV)
        ]
        return torch.cat(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401 - autograd's context
        logits_NV, targets_N = ctx.saved_tensors
        grad_NV = logits_NV if ctx.spend else torch.empty_like(logits_NV)
        counts_N = targets_N != IGNORED
        grad_N1, targets_N1 = (grad_N * counts_N)[:, None], (targets_N * counts_N)[:, None]
        for rows in _chunks(logits_NV):
            # d loss / d logit = p − 1[target].
            change_nV = logits_NV[rows].float().softmax(-1)
            change_nV.scatter_add_(1, targets_N1[rows], change_nV.new_full((len(change_nV), 1), -1))
            grad_NV[rows] = change_nV.mul_(grad_N1[rows])
        return grad_NV, None, None


def _chunks(logits_NV: Tensor) -> Iterator[slice]:
    tokens, vocabulary = logits_NV.shape
    step = max(1, CHUNK_VALUES // vocabulary)
    return (slice(start, start + step) for start in range(0, tokens, step))
