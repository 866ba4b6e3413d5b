"""Rounds of router fit and alignment in one layer, and its rounding to the number format of the checkpoint."""

from dataclasses import replace

import pytest
import torch

from models.experts import ExpertLoop, ExpertWeights
from models.ffn import DenseFFN
from models.routing import GateKind, LinearRouter
from stages.calibration.alignment import column_scale, scale_columns
from stages.project import layer_pass
from stages.project.config import ProjectConfig
from stages.project.layer_pass import Outcome, ProjectedLayer, project_layer, reroute
from stages.routing.descent import RouterSettings
from stages.routing.fit import fit_router
from stages.routing.task import load_balance, make_loop, watch_experts

D, F, E, N, K, S = 6, 12, 3, 4, 1, 2
NONE = torch.empty(0, dtype=torch.long)


def carve_layer(balance):
    """A layer of three groups of neurons, one per input direction; the inputs favour the first direction."""
    generator = torch.Generator().manual_seed(0)
    gate_FD = torch.eye(D)[torch.arange(F) // N] * 3 + 0.1 * torch.randn(F, D, generator=generator)
    ffn = DenseFFN(gate_FD, gate_FD.clone(), torch.randn(D, F, generator=generator), torch.nn.functional.silu)
    shift_D = torch.tensor([0.8, 0, 0, 0, 0, 0])
    inputs = [shift_D + torch.randn(200 + index, D, generator=generator) for index in range(8)]
    neurons_EN = torch.arange(F).view(E, N)
    start = RouterSettings("error", 1e-3, 1000, 200, 0.0, 1, rate=0.05)
    refit = RouterSettings("error", 1e-3, 1000, 200, balance, 1, rate=0.05, logit_std=0.001)
    router = fit_router(watch_experts(ffn, neurons_EN, NONE, inputs, K), start)
    return make_loop(ffn, neurons_EN, NONE, router, K), refit, inputs, [ffn(x_TD) for x_TD in inputs]


def project(balance):
    *layer, inputs, wanted = carve_layer(balance)
    loop, outcome = project_layer(*layer, inputs, wanted, ProjectConfig(descent_steps=0), seed=3)
    return float(load_balance(loop.router, inputs, K).max()), outcome


def test_a_round_that_evens_the_load_is_kept_for_the_price_it_is_worth():
    (uneven, free), (even, paid) = project(0.0), project(10.0)
    assert even < 0.9 * uneven
    assert (paid.rounds, paid.error_end > free.error_end) == (1, True)


def test_descent_starts_from_the_columns_of_the_next_larger_penalty(monkeypatch):
    layer = carve_layer(0.0)
    monkeypatch.setattr(layer_pass, "DESCENT_RATE", 1e-12)
    still = ProjectConfig(rounds=0, descent_steps=1, validate=False)
    loop, outcome = project_layer(*layer, still, seed=3)
    sizes = sorted(still.penalties)
    larger = sizes[sizes.index(outcome.penalty) + 1]
    expected, _ = project_layer(*layer, replace(still, descent_steps=0, penalties=[larger]), seed=3)
    torch.testing.assert_close(loop.experts.down_EDN, expected.experts.down_EDN)


def test_another_router_gets_columns_scaled_for_its_own_gates():
    loop = replace(carve_layer(0.0)[0], gate=GateKind.SIGMOID)
    inputs, rows_ED = carve_layer(0.0)[2], torch.randn(E, D, generator=torch.Generator().manual_seed(5))
    other = LinearRouter.without_bias(3 * rows_ED)
    found, fresh = reroute(scale_columns(loop, column_scale(loop, inputs)), other, inputs), replace(loop, router=other)
    expected = scale_columns(fresh, column_scale(fresh, inputs))
    torch.testing.assert_close(found.experts.down_EDN, expected.experts.down_EDN)
    assert found.router is other


def draw_loop():
    draw = lambda *size: torch.randn(*size, generator=torch.Generator().manual_seed(len(size) + sum(size)))  # noqa: E731
    experts = ExpertWeights(draw(E, N, D), draw(E, N, D), draw(E, D, N), draw(S, D), draw(S, D), draw(D, S))
    router = LinearRouter.without_bias(draw(E, D))
    return ExpertLoop(experts, torch.arange(E * N).view(E, N), torch.tensor([12, 13]), router, 2, 14, torch.relu)


@pytest.mark.parametrize("down_scale", [1.0, 8.0, 58.0])
def test_down_is_rounded_once_as_the_product_that_is_written(down_scale):
    loop = draw_loop()
    layer = ProjectedLayer.of(loop, Outcome(0.1), torch.bfloat16, down_scale)
    written = (layer.experts.down_EDN.float() * down_scale).bfloat16()
    assert torch.equal(written, (loop.experts.down_EDN * down_scale).bfloat16())
    assert layer.experts.gate_END.dtype == torch.bfloat16
    # Later layers get their inputs from the weights that the checkpoint will have.
    torch.testing.assert_close(layer.experts.down_EDN.float(), written.float() / down_scale, rtol=1e-6, atol=0)
