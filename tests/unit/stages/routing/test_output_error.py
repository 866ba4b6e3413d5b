"""The expanded objective against the error of the output."""

from dataclasses import replace

import pytest
import torch

from models.ffn import DenseFFN
from models.routing import GateKind, LinearRouter, chosen_mask
from stages.calibration.alignment import gate_moments, least_squares, scale_columns
from stages.routing import descent as objectives
from stages.routing import task as expert_outputs
from stages.routing.descent import load_variance, relaxed_mask
from stages.routing.task import make_loop, output_error, set_logit_std

D, F, K, T = 6, 13, 2, 29
NEURONS_EN, ALWAYS_S = torch.tensor([[0, 1, 2], [2, 3, 4], [5, 6, 7], [8, 9, 10]]), torch.tensor([11, 12])


@pytest.fixture
def loop():
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    ffn = DenseFFN(draw(F, D), draw(F, D), draw(D, F), torch.nn.functional.silu)
    return make_loop(ffn, NEURONS_EN, ALWAYS_S, LinearRouter(draw(4, D), draw(4)), K), ffn, draw(T, D)


@pytest.mark.parametrize("numbers", [2**26, 100])
def test_cost_of_a_choice_is_the_relative_error_of_the_layer(loop, numbers, monkeypatch):
    monkeypatch.setattr(expert_outputs, "MAX_ELEMENTS", numbers)
    loop, ffn, x_TD = loop
    target_TD = ffn(x_TD)
    objective = output_error(loop, x_TD, target_TD)
    cost = objective.cost(chosen_mask(loop.router.choose(x_TD, K), 4), loop.router.logits(x_TD))
    wanted = (target_TD - loop.always_on_output(x_TD)).square().sum()
    torch.testing.assert_close(cost, float((target_TD - loop(x_TD)).square().sum() / wanted), rtol=1e-4, atol=0)


@pytest.mark.parametrize("kind", [kind for kind in GateKind if kind is not GateKind.CONSTANT])
def test_cost_counts_gates_as_the_checkpoint_will_have_them(loop, kind):
    """The reference scales logits to their final standard deviation and experts to their gates."""
    plain, ffn, x_TD = loop
    plain = replace(plain, router=LinearRouter.without_bias(plain.router.rows_ED))
    target_TD = ffn(x_TD)
    objective = replace(output_error(plain, x_TD, target_TD), gate=kind, logit_std=0.7)
    cost = objective.cost(chosen_mask(plain.router.choose(x_TD, K), 4), plain.router.logits(x_TD))
    emitted = replace(plain, router=set_logit_std(plain.router, [x_TD], 0.7), gate=kind)
    emitted = scale_columns(emitted, least_squares(gate_moments(emitted, [x_TD]))[:, None])
    wanted = (target_TD - emitted.always_on_output(x_TD)).square().sum()
    torch.testing.assert_close(cost, float((target_TD - emitted(x_TD)).square().sum() / wanted), rtol=1e-4, atol=0)


@pytest.mark.parametrize("numbers", [2**20, 40])
def test_loss_of_some_tokens_and_its_gradient(loop, numbers, monkeypatch):
    monkeypatch.setattr(objectives, "GATHERED", numbers)
    loop, ffn, x_TD = loop
    objective, some_t = output_error(loop, x_TD, ffn(x_TD)), torch.tensor([3, 5, 5, 28])
    logits_tE = (x_TD[some_t] @ loop.router.rows_ED.T).requires_grad_()
    loss = objective.error(relaxed_mask(logits_tE, K, 0.3), logits_tE, some_t)
    (gradient_tE,) = torch.autograd.grad(loss, logits_tE)

    mask_tE = relaxed_mask(logits_tE, K, 0.3)
    wanted_tD = (ffn(x_TD) - loop.always_on_output(x_TD))[some_t]
    missed_tD = wanted_tD - torch.einsum("te,ted->td", mask_tE, loop.expert_outputs(x_TD[some_t]))
    plain = missed_tD.square().sum() / wanted_tD.square().sum()
    torch.testing.assert_close(loss, plain, rtol=1e-4, atol=0)
    (plain_tE,) = torch.autograd.grad(plain, logits_tE)
    torch.testing.assert_close(gradient_tE, plain_tE, rtol=1e-3, atol=1e-5)


def test_a_cold_soft_choice_is_the_hard_one():
    logits_TE = torch.randn(T, 5, generator=torch.Generator().manual_seed(0))
    hard_TE = chosen_mask(logits_TE.topk(K).indices, 5)
    torch.testing.assert_close(relaxed_mask(logits_TE, K, 1e-5), hard_TE, atol=1e-3, rtol=0)
    assert torch.equal(relaxed_mask(logits_TE, 5, 0.5), torch.ones(T, 5))


def test_load_variance_is_zero_for_an_even_load():
    assert float(load_variance(torch.ones(T, 3))) == 0
    assert float(load_variance(torch.tensor([[1.0, 0, 0], [1, 0, 0]]))) == pytest.approx(2.0)
