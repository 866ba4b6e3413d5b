"""Layer-wise descent: step sizes, order of tokens, validation split, and the weights that change."""

from dataclasses import fields, replace

import pytest
import torch
from draws import draw

from models.ffn import DenseFFN
from models.routing import LinearRouter
from stages.calibration.alignment import column_scale, relative_error, scale_columns
from stages.calibration.share import Share, split_validation
from stages.project import layer_pass
from stages.project.config import ProjectConfig
from stages.project.layer_pass import load_cost, project_layer, train_experts
from stages.routing.descent import RouterSettings
from stages.routing.task import load_balance, make_loop

D, F, E, N, K, S = 6, 16, 4, 3, 2, 4
REFIT = RouterSettings("error", 1e-3, 1000, 0, 0.0, 1, logit_std=0.001)
DESCENT = ProjectConfig(descent_steps=60, descent_tokens=64, rounds=0)


FFN = DenseFFN(draw(F, D, seed=1), draw(F, D, seed=2), draw(D, F, seed=3), torch.nn.functional.silu)
INPUTS = [draw(90 + index, D, seed=10 + index) for index in range(8)]
WANTED = [FFN(x_TD) for x_TD in INPUTS]


def cut(neurons_EN):
    router = LinearRouter.without_bias(draw(E, D, seed=4))
    return make_loop(FFN, neurons_EN, torch.arange(S), router, K)


def loop_of(neurons_EN=None):
    neurons_EN = torch.arange(S, F).view(E, N) if neurons_EN is None else neurons_EN
    loop = cut(neurons_EN)
    return scale_columns(loop, column_scale(loop, INPUTS))


def train(loop):
    return train_experts(loop, INPUTS, [FFN(x_TD) for x_TD in INPUTS], DESCENT, 5)


def matrices(loop):
    return {spec.name: getattr(loop.experts, spec.name) for spec in fields(loop.experts)}


def test_it_lowers_the_error_on_tokens_it_has_not_seen_and_leaves_the_routing():
    before, after = loop_of(), train(loop_of())
    _, validation = split_validation(len(INPUTS), DESCENT.validation_share)
    errors = [relative_error(loop, INPUTS, WANTED, validation) for loop in (before, after)]
    assert errors[1] < 0.8 * errors[0]
    assert torch.equal(after.router.rows_ED, before.router.rows_ED)
    assert not any(matrix.requires_grad for matrix in matrices(after).values())


def test_the_validation_text_is_the_same_with_random_tokens():
    """The last 3 of 8 batches are random tokens; text 2 and random tokens 6 are for validation in every step."""
    settings = replace(DESCENT, penalties=[0.1], validate=False, descent_steps=3)
    inputs, layer = (
        Share(INPUTS, list(map(len, INPUTS)), INPUTS[0][:0], sources=[""] * 5),
        cut(torch.arange(S, F).view(E, N)),
    )
    others = [7 * y_TD if index in {2, 6} else y_TD for index, y_TD in enumerate(WANTED)]
    (loop, outcome), (other, another) = (
        project_layer(layer, REFIT, inputs, wanted, settings, seed=5) for wanted in (WANTED, others)
    )
    for name, matrix in matrices(loop).items():
        assert torch.equal(matrix, matrices(other)[name]), name
    assert another.error_start == relative_error(loop_of(), INPUTS, others, [2, 6]) > outcome.error_start
    assert outcome.error_end == relative_error(loop, INPUTS, WANTED, [2, 6])
    priced = replace(REFIT, balance=3.0)
    load_E = load_balance(loop.router, INPUTS, K, [2, 6])
    assert load_cost(loop, inputs, priced) == 3 * float((load_E - 1).square().mean())


def test_copies_of_a_neuron_go_their_own_ways():
    neurons_EN = torch.arange(S, F).view(E, N)
    neurons_EN[1, 0] = neurons_EN[0, 0]
    before, after = loop_of(neurons_EN).experts, train(loop_of(neurons_EN)).experts
    assert torch.equal(before.gate_END[0, 0], before.gate_END[1, 0])
    assert not torch.allclose(after.gate_END[0, 0], after.gate_END[1, 0])


@pytest.mark.parametrize(("rate", "kept"), [(0.01, True), (30.0, False)])
def test_descent_that_makes_held_out_tokens_worse_is_not_kept(monkeypatch, rate, kept):
    monkeypatch.setattr(layer_pass, "DESCENT_RATE", rate)
    layer = cut(torch.arange(S, F).view(E, N))
    plain, plainly = project_layer(layer, REFIT, INPUTS, WANTED, replace(DESCENT, descent_steps=0), seed=5)
    trained, outcome = project_layer(layer, REFIT, INPUTS, WANTED, DESCENT, seed=5)
    assert (outcome.error_end < plainly.error_end) == outcome.descended == kept
    assert not plainly.descended
    assert torch.equal(trained.experts.gate_END, plain.experts.gate_END) != kept
