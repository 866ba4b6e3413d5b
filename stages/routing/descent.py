"""Train a router by gradient descent: a few hundred steps on one D × E matrix, the best kept by validation cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from instruments.device import is_launch_bound, rounded_products
from models.routing import GateKind, LinearRouter, chosen_mask, masked_gates
from stages.calibration.normal_equations import ridge_cholesky


def relaxed_mask(logits_TE: Float[Tensor, "T E"], top_k: int, temperature: float) -> Float[Tensor, "T E"]:
    """σ((z − θ) / temperature), θ halfway between the K-th and the next logit; the hard choice as temperature → 0.

    All ones if K = E.
    """
    if top_k == logits_TE.shape[1]:
        return torch.ones_like(logits_TE)
    top_TK = logits_TE.topk(top_k + 1, dim=1).values
    threshold_T = (top_TK[:, -2] + top_TK[:, -1]) / 2
    soft_TE: Tensor = torch.sigmoid((logits_TE - threshold_T[:, None]) / temperature)
    return soft_TE


def load_variance(mask_TE: Float[Tensor, "T E"]) -> Float[Tensor, ""]:
    """Variance over experts of the load, relative to an even share; 0 if the load is even."""
    load_E = mask_TE.mean(0)
    variance: Tensor = (load_E / load_E.mean() - 1).square().mean()
    return variance


GATHERED, GATHERED_ON_GPU = 2**20, 2**28  # overlaps copied at a time: 4 MiB, which fit into a CPU's cache; 1 GiB


@dataclass(frozen=True)
class OutputError:
    """‖r − Σ_{e chosen} g_e·y_e‖²: r is the experts' target output, y_e an expert's output, g_e its scaled gate.

    Expanded as ‖r‖² − 2·gains·w + wᵀ·overlaps·w in the weights w, so that outputs need not be kept. Costs and losses
    are relative to the mean ‖r‖².
    """

    gains_TE: Tensor  # r·y_e
    overlaps_TEE: Tensor  # y_e·y_f
    wanted_T: Tensor  # ‖r‖²
    gate: GateKind = GateKind.CONSTANT
    logit_std: float = 1.0  # of the logits from which gates are computed

    def cost(self, mask_TE: Float[Tensor, "T E"], logits_TE: Float[Tensor, "T E"]) -> float:
        """Relative error of a hard choice on all tokens; its gates are computed from the logits."""
        return float(self.error(mask_TE, logits_TE, torch.arange(len(mask_TE), device=mask_TE.device)))

    def error(self, mask_tE: Tensor, logits_tE: Tensor, tokens_t: Tensor) -> Tensor:
        """Relative error of a soft or hard choice on these tokens."""
        weights_tE = weigh_choice(self.gate, mask_tE, logits_tE, self.logit_std)
        change_t: Tensor = _Change.apply(weights_tE, tokens_t, self.overlaps_TEE, self.gains_TE[tokens_t])  # type: ignore[no-untyped-call]
        wanted_t = self.wanted_T[tokens_t]
        return (wanted_t + change_t).mean() / wanted_t.mean().clamp_min(1e-30)


def weigh_choice(
    gate: GateKind, mask_TE: Float[Tensor, "T E"], logits_TE: Float[Tensor, "T E"], logit_std: float
) -> Float[Tensor, "T E"]:
    """A soft or hard choice times its gates, which are scaled per expert to be nearest to 1.

    The logits are first scaled to `logit_std`, their standard deviation in the checkpoint.
    """
    if gate is GateKind.CONSTANT:
        return mask_TE
    centred_TE = logits_TE - logits_TE.mean(1, keepdim=True)
    final_TE = centred_TE * (logit_std / centred_TE.square().mean().sqrt().clamp_min(1e-30))
    weights_TE = mask_TE * masked_gates(gate, final_TE, mask_TE)
    return weights_TE * (weights_TE.sum(0) / weights_TE.square().sum(0).clamp_min(1e-30))


class _Change(torch.autograd.Function):
    """mᵀ·O·m − 2·g·m of every token, O symmetric; its gradient 2·(O·m − g) comes from the same pass over O.

    On a CPU, O is gathered a few tokens at a time, because a copy of all of it would not fit into the cache.
    """

    @staticmethod
    def forward(ctx: Any, mask_tE: Tensor, tokens_t: Tensor, overlaps_TEE: Tensor, gains_tE: Tensor) -> Tensor:  # noqa: ANN401 - autograd's context
        gathered = GATHERED_ON_GPU if is_launch_bound(mask_tE.device) else GATHERED
        few = max(1, gathered // overlaps_TEE[0].numel())
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


BATCH = 2048  # tokens a step
WARM, COLD = 0.5, 0.1  # temperature of the soft choice at the first and at the last step; the logits' deviation is 1
EVAL_POINTS = 8  # evaluations on the validation tokens


@dataclass(frozen=True)
class Sample:
    """Tokens and the objective of choosing experts for them."""

    x_TD: Tensor
    objective: OutputError

    def cost(self, router: LinearRouter, top_k: int, balance: float) -> float:
        """Cost of the router's hard choice, lower is better."""
        mask_TE = chosen_mask(router.choose(self.x_TD, top_k), router.experts)
        cost = self.objective.cost(mask_TE, self.x_TD @ router.rows_ED.T)
        return cost + (balance * float(load_variance(mask_TE)) if balance else 0.0)


@dataclass(frozen=True)
class RouterSettings:
    """Settings of a router fit."""

    method: str
    penalty: float  # of the ridge, relative to the mean diagonal of the input's second moment
    tokens: int  # to fit on, at most
    steps: int  # of descent
    balance: float  # weight of the variance of the experts' load, against the objective
    seed: int
    rate: float = 0.01  # of the first step
    validation_share: float = 0.125  # of the batches
    logit_std: float = 1.0  # of the checkpoint's logits
    sources: Sequence[str] | None = None  # of the text batches, which come first; None: all are of one source


def descend(
    start: LinearRouter, train: Sample, validation: Sample, top_k: int, settings: RouterSettings
) -> LinearRouter:
    """Train a router; return the one of lowest validation cost, `start` included.

    The coordinates are those in which the inputs are white, so that a step counts equally in every direction.
    """
    factor_DD = ridge_cholesky(train.x_TD.T @ train.x_TD / len(train.x_TD), 1e-3).float()
    inputs_TD = torch.linalg.solve_triangular(factor_DD, train.x_TD.T, upper=False).T.contiguous()
    start = _unit_logits(start, train.x_TD)
    best, lowest = start, validation.cost(start, top_k, settings.balance)
    white_ED = (start.rows_ED @ factor_DD).requires_grad_()
    fused = is_launch_bound(white_ED.device) or None
    optimizer = torch.optim.Adam([white_ED], lr=settings.rate, fused=fused)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=settings.steps)
    generator = torch.Generator().manual_seed(settings.seed)
    drawn = torch.randint(len(inputs_TD), (settings.steps, min(BATCH, len(inputs_TD))), generator=generator)
    for step, tokens_t in enumerate(drawn.to(inputs_TD.device).unbind(), 1):
        with torch.enable_grad(), rounded_products():
            logits_tE = LinearRouter.without_bias(white_ED).logits(inputs_TD[tokens_t])
            temperature = WARM * (COLD / WARM) ** (step / settings.steps)
            loss = train.objective.error(relaxed_mask(logits_tE, top_k, temperature), logits_tE, tokens_t)
            if settings.balance:
                loss = loss + settings.balance * load_variance(relaxed_mask(logits_tE, top_k, temperature))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if step % max(1, settings.steps // EVAL_POINTS) == 0 or step == settings.steps:
            rows_ED = torch.linalg.solve_triangular(factor_DD.T, white_ED.detach().T, upper=True).T.contiguous()
            router = LinearRouter.without_bias(rows_ED)
            cost = validation.cost(router, top_k, settings.balance)
            if cost < lowest:
                best, lowest = router, cost
    return best


def _unit_logits(router: LinearRouter, x_TD: Tensor) -> LinearRouter:
    """Scale the logits to standard deviation 1 over experts, the unit of temperatures."""
    rows_ED = router.rows_ED - router.rows_ED.mean(0)
    deviation = LinearRouter.without_bias(rows_ED).logits(x_TD).square().mean().sqrt().clamp_min(1e-30)
    return LinearRouter.without_bias(rows_ED / deviation)
