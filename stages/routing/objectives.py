"""What a trained router is to minimise, on a sample of tokens held in memory."""

from dataclasses import dataclass
from typing import Protocol

from jaxtyping import Float, Int
from torch import Tensor

from stages.routing.relaxed import relaxed_mask


class Objective(Protocol):
    """Relative to its scale: 0.01 is one percent of what is to be gained."""

    def at(self, tokens_t: Tensor) -> "Objective":
        """The same on some of the tokens."""

    def loss(self, logits_TE: Tensor, top_k: int, temperature: float) -> Tensor:
        """Differentiable, mean over tokens."""

    def cost(self, mask_TE: Tensor) -> float:
        """Of a hard choice, lower is better."""


@dataclass(frozen=True)
class Imitation:
    """Choose the experts that contribute most: a ranking loss with K winners.

    Source: the listwise top-one likelihood, Cao et al. 2007, with K winners of equal weight.
    """

    best_TE: Tensor  # 1 where the expert is among the K of largest contribution

    def at(self, tokens_t: Int[Tensor, "t"]) -> "Imitation":
        """The same on some of the tokens."""
        return Imitation(self.best_TE[tokens_t])

    def loss(self, logits_TE: Float[Tensor, "T E"], top_k: int, temperature: float) -> Float[Tensor, ""]:
        """−Σ_{e best} log softmax(z)_e / K; knows no temperature."""
        del temperature
        likelihood: Tensor = (logits_TE.log_softmax(1) * self.best_TE).sum(1)
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

    @property
    def norms(self) -> Float[Tensor, "T E"]:
        """‖y_e‖."""
        return self.overlaps_TEE.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt()

    def at(self, tokens_t: Int[Tensor, "t"]) -> "OutputError":
        """The same on some of the tokens."""
        return OutputError(self.gains_TE[tokens_t], self.overlaps_TEE[tokens_t], self.wanted_T[tokens_t])

    def loss(self, logits_TE: Float[Tensor, "T E"], top_k: int, temperature: float) -> Float[Tensor, ""]:
        """Relative error of a soft choice."""
        return self._error(relaxed_mask(logits_TE, top_k, temperature))

    def cost(self, mask_TE: Float[Tensor, "T E"]) -> float:
        """Relative error of a hard choice."""
        return float(self._error(mask_TE))

    def _error(self, mask_TE: Tensor) -> Tensor:
        together_TE = (self.overlaps_TEE @ mask_TE[:, :, None])[:, :, 0]
        missed_T = self.wanted_T + (mask_TE * (together_TE - 2 * self.gains_TE)).sum(1)
        return missed_T.mean() / self.wanted_T.mean().clamp_min(1e-30)
