"""CMoE against references that follow the paper step by step."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch.nn.functional import normalize, silu

from models.config import MoEShape
from stages.evaluate.baselines import CMOE_ACTIVE, carve_cmoe, route

D, F, E, N, K, S = 12, 60, 9, 5, 3, 15  # of the fixture `wide`


@pytest.fixture
def batches() -> list[torch.Tensor]:
    return list(torch.randn(4, 50, D, generator=torch.Generator().manual_seed(1)))


def markers(facts, batches):
    """(T, F): 1 for the K_a largest activations of a token, with inputs and rows of length 1."""
    x_TD = normalize(torch.cat(batches), dim=1)
    gate_FD, up_FD = (normalize(rows, dim=1) for rows in (facts.ffn.gate_FD, facts.ffn.up_FD))
    h_TF = silu(x_TD @ gate_FD.T) * (x_TD @ up_FD.T)
    return torch.zeros_like(h_TF).scatter(1, h_TF.abs().topk(CMOE_ACTIVE, dim=1).indices, 1.0)


def test_cmoe_shares_the_neurons_that_are_active_most_often(wide, batches):
    rates_F = markers(wide, batches).sum(0)
    carved, _ = carve_cmoe(wide, batches)
    assert len(carved.always_S) == S
    routed = carved.neurons_EN.flatten()
    assert sorted([*routed.tolist(), *carved.always_S.tolist()]) == list(range(F))
    assert rates_F[carved.always_S].min() >= rates_F[routed].max()


def test_cmoe_groups_neurons_by_the_best_balanced_assignment(wide, batches):
    """The paper's own problem: every place in an expert is a column of a square assignment."""
    marked_TF = markers(wide, batches)
    carved, _ = carve_cmoe(wide, batches)
    rest = [neuron for neuron in range(F) if neuron not in carved.always_S.tolist()]
    rates = marked_TF[:, rest].sum(0)
    seeds = [rest[place] for place in rates.argsort(descending=True, stable=True)[:E].tolist()]
    distance_RE = torch.cdist(marked_TF[:, rest].T, marked_TF[:, seeds].T, p=1).numpy()
    slots = np.repeat(distance_RE, N, axis=1)
    best = slots[linear_sum_assignment(slots)].sum()
    total = sum(distance_RE[rest.index(one), e] for e, group in enumerate(carved.neurons_EN.tolist()) for one in group)
    assert total == pytest.approx(best)


def test_cmoe_routes_by_the_neuron_closest_to_each_experts_mean(wide, batches):
    marked_TF, x_TD = markers(wide, batches), batches[0]
    carved, choose = carve_cmoe(wide, batches)
    typical = []
    for neurons_N in carved.neurons_EN:
        distances_N = (marked_TF[:, neurons_N] - marked_TF[:, neurons_N].mean(1, keepdim=True)).abs().sum(0)
        typical.append(int(neurons_N[distances_N.argmin()]))
    gate_ED, up_ED = (normalize(rows[typical], dim=1) for rows in (wide.ffn.gate_FD, wide.ffn.up_FD))
    scores_TE = (silu(x_TD @ gate_ED.T) * (x_TD @ up_ED.T)).abs()
    assert choose(x_TD, x_TD).sort(1).values.tolist() == scores_TE.topk(K, dim=1).indices.sort(1).values.tolist()


@pytest.mark.parametrize("shape", [MoEShape(E, N, K, S), MoEShape(7, 7, 2, 14), MoEShape(4, 25, 1, 0)])
def test_cmoe_has_at_most_the_active_width_of_the_carve(wide, batches, shape):
    """With neurons that fill no expert, and with experts that overlap in the carve."""
    carved, choose = carve_cmoe(replace(wide, shape=shape), batches)
    neurons = [*carved.neurons_EN.flatten().tolist(), *carved.always_S.tolist()]
    assert len(set(neurons)) == len(neurons)
    h_TF = wide.ffn.hidden(batches[0])
    active_TF = route(carved, choose).features(batches[0]) / h_TF
    (width,) = {round(float(count)) for count in active_TF.sum(1)}
    assert shape.active_width - shape.n < width <= shape.active_width
