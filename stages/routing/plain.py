"""Router rows that no objective is minimised for: controls, starts, and what others have used."""

import torch
from jaxtyping import Float
from torch import Tensor

from models.routing import chosen_mask
from stages.routing.task import RouterTask


def draw_random(task: RouterTask, seed: int) -> Float[Tensor, "E D"]:
    """Seeded standard normal rows: the plain start for router training, and the control for the others."""
    like_TD = task.inputs[0]
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(task.experts, like_TD.shape[1], generator=generator).to(like_TD.device)


def fit_centroid(task: RouterTask) -> Float[Tensor, "E D"]:
    """Mean input of the tokens for which the expert is among the K of largest contribution, against the mean of all."""
    experts, hidden_size = task.experts, task.inputs[0].shape[1]
    sums_ED = torch.zeros(experts, hidden_size, device=task.inputs[0].device)
    counts_E = torch.zeros(experts, device=sums_ED.device)
    for index, x_TD in enumerate(task.inputs):
        served_TE = chosen_mask(task.best_experts(index), experts)
        sums_ED += served_TE.T @ x_TD
        counts_E += served_TE.sum(0)
    mean_D = sum(x_TD.sum(0) for x_TD in task.inputs) / sum(len(x_TD) for x_TD in task.inputs)
    centred_ED = sums_ED / counts_E.clamp_min(1)[:, None] - mean_D
    return torch.where(counts_E[:, None] > 0, centred_ED, 0.0)


def average_gate_rows(task: RouterTask) -> Float[Tensor, "E D"]:
    """The mean gate row of an expert's units.

    Source: the parameter centres of MoEfication, arXiv:2110.01786.
    """
    rows_ED: Tensor = task.loop.experts.gate_END.mean(1)
    return rows_ED


def take_representatives(task: RouterTask) -> Float[Tensor, "E D"]:
    """The gate row of the unit whose contribution follows its expert's best: highest correlation over tokens.

    Source: the analytical router of CMoE, arXiv:2502.04416; differs: the row alone, as a linear router has it, and
    correlation instead of the distance to a centroid.
    """
    best_E = [_representative(task, expert) for expert in range(task.experts)]
    rows_ED: Tensor = task.loop.experts.gate_END[torch.arange(task.experts), torch.tensor(best_E)]
    return rows_ED


def _representative(task: RouterTask, expert: int) -> int:
    """Which unit of one expert correlates best with all of it; the columns' norms change no correlation."""
    loop, sums = task.loop, None
    for x_TD, wanted_TE in zip(task.inputs, task.contributions, strict=True):
        unit_TN = loop.hidden(x_TD, loop.experts.gate_END[expert], loop.experts.up_END[expert]).abs().double()
        wanted_T = wanted_TE[:, expert].double()
        moments = torch.stack([unit_TN.sum(0), unit_TN.square().sum(0), wanted_T @ unit_TN])
        totals = torch.stack([wanted_T.sum(), wanted_T.new_tensor(len(x_TD))])
        sums = (moments, totals) if sums is None else (sums[0] + moments, sums[1] + totals)
    assert sums is not None, "no calibration batch"
    (first_N, second_N, product_N), (wanted, tokens) = sums
    covariance_N = product_N / tokens - first_N / tokens * (wanted / tokens)
    variance_N = (second_N / tokens - (first_N / tokens).square()).clamp_min(1e-30)
    return int((covariance_N / variance_N.sqrt()).argmax())
