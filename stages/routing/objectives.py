"""What a trained router is to minimise, on a sample of tokens held in memory."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from stages.routing.relaxed import relaxed_mask

GATHERED = 2**20  # numbers: 4 MiB


class Objective(Protocol):
    """Relative to its scale: 0.01 is one percent of what is to be gained."""

    def loss(self, tokens_t: Tensor, logits_tE: Tensor, top_k: int, temperature: float) -> Tensor:
        """Differentiable, mean over some of the tokens."""

    def cost(self, mask_TE: Tensor) -> float:
        """Of a hard choice, lower is better."""


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

    def cost(self, mask_TE: Float[Tensor, "T E"]) -> float:
        """Share of the best experts that are not chosen."""
        return 1 - float((mask_TE * self.best_TE).sum() / self.best_TE.sum())


@dataclass(frozen=True)
class OutputError:
    """‖r − Σ_{e chosen} y_e‖², r what the experts are to give and y_e what each gives.

    Expanded as ‖r‖² − 2·gains·m + mᵀ·overlaps·m in the mask m, so that no output is kept.
    """

    gains_TE: Tensor  # r·y_e
    overlaps_TEE: Tensor  # y_e·y_f
    wanted_T: Tensor  # ‖r‖²

    def loss(
        self, tokens_t: Int[Tensor, "t"], logits_tE: Float[Tensor, "t E"], top_k: int, temperature: float
    ) -> Float[Tensor, ""]:
        """Relative error of a soft choice."""
        return self._error(relaxed_mask(logits_tE, top_k, temperature), tokens_t)

    def cost(self, mask_TE: Float[Tensor, "T E"]) -> float:
        """Relative error of a hard choice, on all tokens."""
        return float(self._error(mask_TE, torch.arange(len(mask_TE), device=mask_TE.device)))

    def _error(self, mask_tE: Tensor, tokens_t: Tensor) -> Tensor:
        change_t: Tensor = _Change.apply(mask_tE, tokens_t, self.overlaps_TEE, self.gains_TE[tokens_t])  # type: ignore[no-untyped-call]
        wanted_t = self.wanted_T[tokens_t]
        return (wanted_t + change_t).mean() / wanted_t.mean().clamp_min(1e-30)


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
