import pytest
import torch

from models.experts import LayerExperts
from models.ffn import DenseFFN
from models.routing import active_copies, choose_experts, membership
from stages.assemble.replicas import divide_by_multiplicity
from stages.assemble.router import fit_router, load_balance, oracle_agreement, set_spread, watch_experts

D, F, E, N, K = 6, 12, 3, 4, 1


@pytest.fixture
def task():
    """Three groups of units, each answering to its own direction of the input."""
    generator = torch.Generator().manual_seed(0)
    gate_FD = torch.eye(D)[torch.arange(F) // N] * 3 + 0.1 * torch.randn(F, D, generator=generator)
    ffn = DenseFFN(gate_FD, gate_FD.clone(), torch.randn(D, F, generator=generator), torch.nn.functional.silu)
    inputs = [torch.randn(40 + index, D, generator=generator) for index in range(4)]
    return watch_experts(ffn, torch.arange(F).view(E, N), inputs, K)[0]


@pytest.mark.parametrize(("method", "least"), [("ridge", 0.5), ("centroid", 0.5)])
def test_fitted_routers_beat_chance(task, method, least):
    rows_ED = fit_router(method, task, penalty=1e-3, seed=1)
    assert rows_ED.shape == (E, D)
    assert oracle_agreement(rows_ED, task) > least > K / E


def test_a_random_router_is_seeded_and_near_chance(task):
    rows_ED = fit_router("random", task, penalty=1e-3, seed=1)
    assert torch.equal(rows_ED, fit_router("random", task, penalty=1e-3, seed=1))
    assert not torch.equal(rows_ED, fit_router("random", task, penalty=1e-3, seed=2))


def test_ridge_recovers_contributions_that_are_linear():
    """With |h| linear in x (all gates open, inputs positive) the router's order is the oracle's."""
    generator = torch.Generator().manual_seed(0)
    gate_FD = torch.ones(F, D)
    up_FD = torch.rand(F, D, generator=generator)
    ffn = DenseFFN(gate_FD, up_FD, torch.randn(D, F, generator=generator), torch.ones_like)
    inputs = [torch.rand(60, D, generator=generator)]
    task, outputs = watch_experts(ffn, torch.arange(F).view(E, N), inputs, K)
    torch.testing.assert_close(outputs[0], ffn(inputs[0]))
    assert oracle_agreement(fit_router("ridge", task, penalty=1e-9, seed=0), task) == 1.0


def test_spread_sets_the_deviation_and_keeps_the_choice(task):
    rows_ED = fit_router("ridge", task, penalty=1e-3, seed=1)
    scaled_ED = set_spread(rows_ED, task.inputs, 0.25)
    x_TD = torch.cat(list(task.inputs))
    logits_TE = x_TD @ scaled_ED.T
    assert float((logits_TE - logits_TE.mean(1, keepdim=True)).square().mean().sqrt()) == pytest.approx(0.25, rel=1e-4)
    assert torch.equal(choose_experts(logits_TE, K), choose_experts(x_TD @ rows_ED.T, K))


def test_spread_zero_gives_constant_gates(task):
    assert not set_spread(fit_router("ridge", task, penalty=1e-3, seed=1), task.inputs, 0.0).any()


def test_load_is_relative_to_an_even_share(task):
    rows_ED = torch.zeros(E, D)
    rows_ED[2, 0] = 100.0  # serves every token whose first feature is positive
    load_E = load_balance(rows_ED, task.inputs, 1)
    x_TD = torch.cat(list(task.inputs))
    assert float(load_E[2]) == pytest.approx(E * float((x_TD[:, 0] > 0).float().mean()), abs=1e-6)
    assert float(load_E.mean()) == pytest.approx(1.0)


def test_active_copies_count_replicas_and_always_on_units():
    units_EN = torch.tensor([[0, 1], [1, 2], [3, 4]])
    copies_TF = active_copies(torch.tensor([[0, 1], [2, 0]]), membership(units_EN, 7), torch.tensor([6]))
    assert copies_TF.tolist() == [[1, 2, 1, 0, 0, 0, 1], [1, 1, 0, 1, 1, 0, 1]]


def test_copies_share_a_down_column():
    units_EN = torch.tensor([[0, 1], [1, 2], [1, 3]])
    multiplicity_F = torch.tensor([1, 3, 1, 1])
    none = torch.empty(0, 5)
    experts = LayerExperts(torch.ones(3, 2, 5), torch.ones(3, 2, 5), torch.ones(3, 5, 2), none, none, none.T)
    shared = divide_by_multiplicity(experts, units_EN, multiplicity_F)
    torch.testing.assert_close(shared.down_EDN[:, 0], torch.tensor([[1, 1 / 3], [1 / 3, 1], [1 / 3, 1]]))
    assert torch.equal(shared.gate_END, experts.gate_END)
