from dataclasses import replace

import pytest
import torch

from models.ffn import DenseFFN
from models.routing import active_copies, membership
from stages.calibration.alignment import relative_error
from stages.routing.fit import RouterSettings, fit_router
from stages.routing.task import load_balance, set_logit_std, watch_experts

D, F, E, N, K = 6, 12, 3, 4, 1


def settings(method, **changes):
    return RouterSettings(method, 1e-3, 1000, **({"steps": 60, "rate": 0.05, "balance": 0.0, "seed": 1} | changes))


def make_task(*, shift=0.0, tokens=40):
    """Make a routing task of three groups of neurons, one per input direction."""
    generator = torch.Generator().manual_seed(0)
    gate_FD = torch.eye(D)[torch.arange(F) // N] * 3 + 0.1 * torch.randn(F, D, generator=generator)
    down_DF = torch.randn(D, F, generator=generator)
    ffn = DenseFFN(gate_FD, gate_FD.clone(), down_DF, torch.nn.functional.silu)
    inputs = [shift + torch.randn(tokens + index, D, generator=generator) for index in range(8)]
    return watch_experts(ffn, torch.arange(F).view(E, N), torch.empty(0, dtype=torch.long), inputs, K)


def error(router, task):
    """Of the layer's output, relative."""
    return relative_error(replace(task.loop, router=router), task.inputs, task.wanted, range(len(task.inputs)))


@pytest.fixture
def task():
    return make_task()


def test_a_random_router_is_seeded_and_fitted_to_nothing(task):
    router = fit_router(task, settings("random"))
    assert torch.equal(router.rows_ED, fit_router(task, settings("random")).rows_ED)
    assert not torch.equal(router.rows_ED, fit_router(task, settings("random", seed=2)).rows_ED)


def test_training_lowers_the_output_error():
    task = make_task(tokens=200)
    trained, fitted = (error(fit_router(task, settings("error", steps=steps)), task) for steps in (200, 0))
    assert trained < 0.98 * fitted


def test_descent_never_gives_back_worse_than_it_got(task):
    start, x_TD = fit_router(task, settings("error", steps=0)), torch.cat(list(task.inputs))
    wild = fit_router(task, settings("error", rate=1e6, steps=8))
    assert torch.equal(wild.choose(x_TD, K), start.choose(x_TD, K))


def test_refitting_starts_from_the_experts_as_they_are():
    task = make_task()
    down_EDN = task.loop.experts.down_EDN * torch.tensor([1.0, 1.0, 9.0])[:, None, None]
    louder = replace(task.loop.experts, down_EDN=down_EDN)
    changed = replace(task, loop=replace(task.loop, router=fit_router(task, settings("error")), experts=louder))
    again = fit_router(changed, settings("error", steps=0))
    assert torch.equal(again.rows_ED, fit_router(changed, settings("error", steps=0)).rows_ED)
    assert not torch.equal(again.rows_ED, fit_router(task, settings("error", steps=0)).rows_ED)


def test_balance_evens_the_load_and_costs_error():
    task = make_task(shift=torch.tensor([0.8, 0, 0, 0, 0, 0]), tokens=200)
    uneven, even = (fit_router(task, settings("error", balance=balance, steps=200)) for balance in (0.0, 1.0))
    loads = [float(load_balance(router, task.inputs, K).max()) for router in (uneven, even)]
    assert loads[1] < 0.9 * loads[0]
    assert error(even, task) > error(uneven, task)


def test_logit_std_sets_the_deviation_and_keeps_the_choice():
    task = make_task(shift=0.5)
    router = replace(fit_router(task, settings("error", steps=0)), bias_E=torch.arange(float(E)))
    scaled = set_logit_std(router, task.inputs, 0.25)
    x_TD = torch.cat(list(task.inputs))
    logits_TE = x_TD @ scaled.rows_ED.T
    assert float((logits_TE - logits_TE.mean(1, keepdim=True)).square().mean().sqrt()) == pytest.approx(0.25, rel=1e-4)
    assert torch.equal(scaled.choose(x_TD, K), router.choose(x_TD, K))
    assert float(scaled.bias_E.mean()) == pytest.approx(0, abs=1e-6)
    constant = set_logit_std(router, task.inputs, 0.0)
    assert not constant.rows_ED.any()
    assert not constant.bias_E.any()


def test_active_copies_count_replicas_and_always_on_neurons():
    neurons_EN = torch.tensor([[0, 1], [1, 2], [3, 4]])
    copies_TF = active_copies(torch.tensor([[0, 1], [2, 0]]), membership(neurons_EN, 7), torch.tensor([6]))
    assert copies_TF.tolist() == [[1, 2, 1, 0, 0, 0, 1], [1, 1, 0, 1, 1, 0, 1]]
