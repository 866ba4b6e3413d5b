"""One linear router per layer, fitted on the dense model's own FFN inputs."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from models.ffn import DenseFFN
from models.routing import choose_experts, membership
from stages.calibration.contributions import expert_contributions
from stages.calibration.normal_equations import NormalEquations


@dataclass(frozen=True)
class RouterTask:
    """What a router of one layer is fitted on, a batch each."""

    top_k: int
    inputs: Sequence[Tensor]  # (T, D) FFN inputs
    contributions: Sequence[Tensor]  # (T, E) Σ_{i∈e} |h_i|·‖d_i‖ of every expert

    @property
    def experts(self) -> int:
        """E."""
        return self.contributions[0].shape[1]


def watch_experts(
    ffn: DenseFFN, units_EN: Int[Tensor, "E N"], inputs: Sequence[Tensor], top_k: int
) -> tuple[RouterTask, list[Tensor]]:
    """The task of fitting a router, and the FFN's outputs (T, D), from one look at the activations."""
    member_EF = membership(units_EN, ffn.width)
    contributions, outputs = [], []
    for x_TD in inputs:
        h_TF = ffn.hidden(x_TD)
        contributions.append(expert_contributions(ffn, h_TF, member_EF))
        outputs.append(ffn.output(h_TF))
    return RouterTask(top_k, inputs, contributions), outputs


def fit_router(method: str, task: RouterTask, *, penalty: float, seed: int) -> Float[Tensor, "E D"]:
    """Router rows of one layer: random, centroid or ridge."""
    if method == "ridge":
        return fit_ridge(task, penalty)
    if method == "centroid":
        return fit_centroid(task)
    return draw_random(task.experts, task.inputs[0], seed)


def draw_random(experts: int, like_TD: Tensor, seed: int) -> Float[Tensor, "E D"]:
    """Seeded standard normal rows: the plain start for router training, and the control for the others."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(experts, like_TD.shape[1], generator=generator).to(like_TD.device)


def fit_ridge(task: RouterTask, penalty: float) -> Float[Tensor, "E D"]:
    """Regress each expert's contribution on the FFN input.

    The regression is linear without intercept, so its weight is the router's weight. What all experts of a token have
    in common does not change their order: it is taken out of the targets, which the regression then need not explain.
    """
    moments = NormalEquations(task.inputs[0].shape[1], task.experts, device=task.inputs[0].device)
    for x_TD, wanted_TE in zip(task.inputs, task.contributions, strict=True):
        moments.add(x_TD, wanted_TE - wanted_TE.mean(1, keepdim=True))
    return moments.solve(penalty)


def fit_centroid(task: RouterTask) -> Float[Tensor, "E D"]:
    """Mean input of the tokens for which the expert is among the K of largest contribution, against the mean of all."""
    experts, hidden_size = task.experts, task.inputs[0].shape[1]
    sums_ED = torch.zeros(experts, hidden_size, device=task.inputs[0].device)
    counts_E = torch.zeros(experts, device=sums_ED.device)
    for x_TD, contribution_TE in zip(task.inputs, task.contributions, strict=True):
        best_TK = choose_experts(contribution_TE, task.top_k)
        served_TE = torch.zeros(len(x_TD), experts, device=x_TD.device).scatter_(1, best_TK, 1.0)
        sums_ED += served_TE.T @ x_TD
        counts_E += served_TE.sum(0)
    mean_D = sum(x_TD.sum(0) for x_TD in task.inputs) / sum(len(x_TD) for x_TD in task.inputs)
    centred_ED = sums_ED / counts_E.clamp_min(1)[:, None] - mean_D
    return torch.where(counts_E[:, None] > 0, centred_ED, 0.0)


def set_spread(rows_ED: Float[Tensor, "E D"], inputs: Sequence[Tensor], spread: float) -> Float[Tensor, "E D"]:
    """Scale the rows so that a token's logits have the standard deviation `spread` over experts, on average.

    The rows are centred first: a shift common to all experts changes neither softmax nor choice.
    """
    centred_ED = rows_ED - rows_ED.mean(0)
    squares = sum(float((x_TD @ centred_ED.T).double().square().mean(1).sum()) for x_TD in inputs)
    deviation = (squares / sum(len(x_TD) for x_TD in inputs)) ** 0.5
    return centred_ED * (spread / deviation) if deviation > 0 else centred_ED


def load_balance(rows_ED: Float[Tensor, "E D"], inputs: Sequence[Tensor], top_k: int) -> Float[Tensor, "E"]:
    """Each expert's share of the routed tokens, relative to an even share (1 = even)."""
    counts_E = torch.zeros(len(rows_ED), device=rows_ED.device)
    for x_TD in inputs:
        counts_E += torch.bincount(choose_experts(x_TD @ rows_ED.T, top_k).flatten(), minlength=len(rows_ED))
    return counts_E / counts_E.mean()


def oracle_agreement(rows_ED: Float[Tensor, "E D"], task: RouterTask) -> float:
    """Mean share of the K experts of largest contribution that the router also chooses."""
    agreed, total = 0, 0
    for x_TD, contribution_TE in zip(task.inputs, task.contributions, strict=True):
        chosen_TE = torch.zeros(len(x_TD), len(rows_ED), device=x_TD.device)
        chosen_TE.scatter_(1, choose_experts(x_TD @ rows_ED.T, task.top_k), 1.0)
        best_TK = choose_experts(contribution_TE, task.top_k)
        agreed += int(chosen_TE.gather(1, best_TK).sum())
        total += best_TK.numel()
    return agreed / total
