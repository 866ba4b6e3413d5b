"""Routers trained by gradient descent: a few hundred steps on one D × E matrix, held-out tokens decide."""

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from models.routing import LinearRouter, chosen_mask
from stages.routing.objectives import Objective
from stages.routing.relaxed import load_variance, relaxed_mask

BATCH = 2048  # tokens a step
WARM, COLD = 0.5, 0.1  # temperature of the soft choice at the first and at the last step, in spreads of the logits
LOOKS = 8  # times that the held-out tokens are asked


Wanted_co = TypeVar("Wanted_co", bound=Objective, covariant=True)


@dataclass(frozen=True)
class Sample(Generic[Wanted_co]):
    """Tokens and what is wanted of them."""

    x_TD: Tensor
    objective: Wanted_co

    def cost(self, router: LinearRouter, top_k: int, balance: float) -> float:
        """Of the router's hard choice."""
        mask_TE = chosen_mask(router.choose(self.x_TD, top_k), router.experts)
        cost = self.objective.cost(mask_TE, self.x_TD @ router.rows_ED.T)
        return cost + (balance * float(load_variance(mask_TE)) if balance else 0.0)


@dataclass(frozen=True)
class DescentSettings:
    """`balance` weighs the variance of the experts' load against the objective."""

    steps: int
    rate: float
    balance: float
    seed: int


class _Whitened:
    """Rows in coordinates in which the inputs are white: a step there is as long in every direction."""

    def __init__(self, x_TD: Float[Tensor, "T D"]) -> None:
        gram_DD = (x_TD.T @ x_TD / len(x_TD)).double()
        gram_DD.diagonal().add_(1e-3 * gram_DD.diagonal().mean() + 1e-30)
        self.factor_DD = torch.linalg.cholesky(gram_DD).float()

    def inputs(self, x_TD: Tensor) -> Tensor:
        white_TD: Tensor = torch.linalg.solve_triangular(self.factor_DD, x_TD.T, upper=False).T.contiguous()
        return white_TD

    def from_rows(self, rows_ED: Tensor) -> Tensor:
        white_ED: Tensor = rows_ED @ self.factor_DD
        return white_ED

    def to_rows(self, white_ED: Tensor) -> Tensor:
        rows_ED: Tensor = torch.linalg.solve_triangular(self.factor_DD.T, white_ED.T, upper=True).T.contiguous()
        return rows_ED


def descend(
    start: LinearRouter,
    fitted: Sample[Objective],
    guard: Sample[Objective],
    top_k: int,
    settings: DescentSettings,
    *,
    biased: bool,
) -> LinearRouter:
    """Improve a router until held-out tokens see no more of it; at worst, `start` comes back.

    Args:
        start: where to begin.
        fitted: tokens to train on.
        guard: tokens to judge by.
        top_k: K.
        settings: of the descent.
        biased: train the bias, too.
    """
    space = _Whitened(fitted.x_TD)
    inputs_TD = space.inputs(fitted.x_TD)
    start = _unit_spread(start, fitted.x_TD)
    best, lowest = start, guard.cost(start, top_k, settings.balance)
    white_ED = space.from_rows(start.rows_ED).requires_grad_()
    bias_E = start.bias_E.clone().requires_grad_(biased)
    optimizer = torch.optim.Adam([white_ED, bias_E] if biased else [white_ED], lr=settings.rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=settings.steps)
    generator = torch.Generator().manual_seed(settings.seed)
    for step in range(1, settings.steps + 1):
        tokens_t = torch.randint(len(inputs_TD), (min(BATCH, len(inputs_TD)),), generator=generator)
        tokens_t = tokens_t.to(inputs_TD.device)
        with torch.enable_grad():
            logits_tE = torch.addmm(bias_E, inputs_TD[tokens_t], white_ED.T)
            temperature = WARM * (COLD / WARM) ** (step / settings.steps)
            loss = fitted.objective.loss(tokens_t, logits_tE, top_k, temperature)
            if settings.balance:
                loss = loss + settings.balance * load_variance(relaxed_mask(logits_tE, top_k, temperature))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if step % max(1, settings.steps // LOOKS) == 0 or step == settings.steps:
            router = LinearRouter(space.to_rows(white_ED.detach()), bias_E.detach().clone())
            cost = guard.cost(router, top_k, settings.balance)
            if cost < lowest:
                best, lowest = router, cost
    return best


def _unit_spread(router: LinearRouter, x_TD: Tensor) -> LinearRouter:
    """Logits of standard deviation 1 over experts, the unit in which temperatures are given."""
    rows_ED, bias_E = router.rows_ED - router.rows_ED.mean(0), router.bias_E - router.bias_E.mean()
    deviation = LinearRouter(rows_ED, bias_E).logits(x_TD).square().mean().sqrt().clamp_min(1e-30)
    return LinearRouter(rows_ED / deviation, bias_E / deviation)
