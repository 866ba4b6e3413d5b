"""What a trained router is to minimise, on a sample of tokens held in memory."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from models.gating import GateKind, masked_gates
from stages.routing.relaxed import relaxed_mask

GATHERED = 2**20  # numbers: 4 MiB


class Objective(Protocol):
    """Relative to its scale: 0.01 is one percent of what is to be gained."""

    def loss(self, tokens_t: Tensor, logits_tE: Tensor, top_k: int, temperature: float) -> Tensor:
        """Differentiable, mean over some of the tokens."""

    def cost(self, mask_TE: Tensor, logits_TE: Tensor) -> float:
        """Of a hard choice and the logits it is weighed by, lower is better."""


@dataclass(frozen=True)
class Imitation:
    """Choose the experts that contribute most: a ranking loss with K winners.

    Source: the listwise top-one likelihood, Cao et al. 2007, with K winners of equal weight.
    """

    best_TE: Tensor  # 1 where the expert is among the K of largest contribution

    def loss(
        self, tokens_t: Int[Tensor, "t"], logits_tE: Float[Tensor, "t E"], top_k: int, temperature: float
    ) -> Float[Tensor, ""]:
        """−Σ_{e best} log softmax(z)_e / K; knows no temperature."""
        del temperature
        likelihood: Tensor = (logits_tE.log_softmax(1) * self.best_TE[tokens_t]).sum(1)
        return -likelihood.mean() / top_k

    def cost(self, mask_TE: Float[Tensor, "T E"], logits_TE: Float[Tensor, "T E"]) -> float:
        """Share of the best experts that are not chosen."""
        del logits_TE
        return 1 - float((mask_TE * self.best_TE).sum() / self.best_TE.sum())


@dataclass(frozen=True)
class OutputError:
    """‖r − Σ_{e chosen} g_e·y_e‖², r what the experts are to give, y_e what each gives and g_e its scaled gate.

    Expanded as ‖r‖² − 2·gains·w + wᵀ·overlaps·w in the weights w, so that no output is kept.
    """

    gains_TE: Tensor  # r·y_e
    overlaps_TEE: Tensor  # y_e·y_f
    wanted_T: Tensor  # ‖r‖²
    gate: GateKind = GateKind.CONSTANT
    logit_std: float = 1.0  # of the logits that the gates are of

    def loss(
        self, tokens_t: Int[Tensor, "t"], logits_tE: Float[Tensor, "t E"], top_k: int, temperature: float
    ) -> Float[Tensor, ""]:
        """Relative error of a soft choice."""
        return self._error(relaxed_mask(logits_tE, top_k, temperature), logits_tE, tokens_t)

    def cost(self, mask_TE: Float[Tensor, "T E"], logits_TE: Float[Tensor, "T E"]) -> float:
        """Relative error of a hard choice, on all tokens."""
        return float(self._error(mask_TE, logits_TE, torch.arange(len(mask_TE), device=mask_TE.device)))

    def _error(self, mask_tE: Tensor, logits_tE: Tensor, tokens_t: Tensor) -> Tensor:
        weights_tE = weigh_choice(self.gate, mask_tE, logits_tE, self.logit_std)
        change_t: Tensor = _Change.apply(weights_tE, tokens_t, self.overlaps_TEE, self.gains_TE[tokens_t])  # type: ignore[no-untyped-call]
        wanted_t = self.wanted_T[tokens_t]
        return (wanted_t + change_t).mean() / wanted_t.mean().clamp_min(1e-30)


def weigh_choice(
    gate: GateKind, mask_TE: Float[Tensor, "T E"], logits_TE: Float[Tensor, "T E"], logit_std: float
) -> Float[Tensor, "T E"]:
    """A choice, soft or hard, times its gates, each expert's scaled so that they are nearest to 1.

    As a checkpoint will have them: the logits are first brought to their final standard deviation.
    """
    if gate is GateKind.CONSTANT:
        return mask_TE
    centred_TE = logits_TE - logits_TE.mean(1, keepdim=True)
    final_TE = centred_TE * (logit_std / centred_TE.square().mean().sqrt().clamp_min(1e-30))
    weights_TE = mask_TE * masked_gates(gate, final_TE, mask_TE)
    return weights_TE * (weights_TE.sum(0) / weights_TE.square().sum(0).clamp_min(1e-30))


class _Change(torch.autograd.Function):
    """mᵀ·O·m − 2·g·m of every token, O symmetric: read once, for by then its gradient 2·(O·m − g) is at hand.

    O is gathered a few tokens at a time: all of them at once are a copy that no cache holds.
    """

    @staticmethod
    def forward(ctx: Any, mask_tE: Tensor, tokens_t: Tensor, overlaps_TEE: Tensor, gains_tE: Tensor) -> Tensor:  # noqa: ANN401 - autograd's context
        few = max(1, GATHERED // overlaps_TEE[0].numel())
        parts = zip(torch.split(tokens_t, few), torch.split(mask_tE, few), strict=True)
        together_tE = torch.cat(
            [torch.bmm(overlaps_TEE[some], mask_sE[:, :, None])[:, :, 0] for some, mask_sE in parts]
        )
        ctx.save_for_backward(together_tE - gains_tE)
        return (mask_tE * (together_tE - 2 * gains_tE)).sum(1)

    @staticmethod
    def backward(ctx: Any, grad_t: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: ANN401 - autograd's context
        (missing_tE,) = ctx.saved_tensors
        return 2 * grad_t[:, None] * missing_tE, None, None, None
