"""Language-model losses."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from stages.data.encoding import IGNORED
from stages.metrics.cross_entropy import cross_entropy


def token_losses(
    logits_BTV: Float[Tensor, "B T V"], labels_BT: Int[Tensor, "B T"], *, spend: bool = False
) -> Float[Tensor, "B T-1"]:
    """Cross-entropy in nats of each next token, 0 where the label is ignored (-100); fp32.

    Labels are moved, not logits: a slice of those would be copied, and its gradient filled up again.

    Args:
        logits_BTV: of the model.
        labels_BT: token ids.
        spend: the backward pass writes its gradient over the logits (see `cross_entropy`).
    """
    targets_BT = torch.nn.functional.pad(labels_BT[:, 1:], (0, 1), value=IGNORED)
    losses_N = cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), spend=spend)
    return losses_N.view(targets_BT.shape)[:, :-1]


def supervised_tokens(labels_BT: Int[Tensor, "B T"]) -> Int[Tensor, "B"]:
    """How many next tokens of each sample count in its loss."""
    return (labels_BT[:, 1:] != IGNORED).sum(1)


def sample_losses(
    logits_BTV: Float[Tensor, "B T V"], labels_BT: Int[Tensor, "B T"], *, spend: bool = False
) -> Float[Tensor, "B"]:
    """Mean loss of each sample over its supervised tokens; arguments as of `token_losses`."""
    return token_losses(logits_BTV, labels_BT, spend=spend).sum(1) / supervised_tokens(labels_BT)


@dataclass(frozen=True)
class MeanLoss:
    """Next-token loss over all supervised tokens of a text."""

    total: float  # nats
    tokens: int

    @property
    def nats(self) -> float:
        """Mean per token."""
        return self.total / self.tokens

    @property
    def perplexity(self) -> float:
        """Exp of the mean."""
        return math.exp(min(self.nats, 700.0))
