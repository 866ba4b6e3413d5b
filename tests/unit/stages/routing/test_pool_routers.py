"""Routers over a pool whose experts mostly come from other layers."""

from dataclasses import replace

import pytest
import torch
from draws import draw

from models.experts import ExpertLoop, ExpertWeights
from models.routing import LinearRouter
from stages.calibration.alignment import relative_error
from stages.routing import task as expert_outputs
from stages.routing.descent import RouterSettings
from stages.routing.fit import fit_pool_router, regress, split
from stages.routing.task import error_drops, watch_pool

T, D, E, N, K, S = 29, 6, 4, 3, 1, 2
SILU = torch.nn.functional.silu


@pytest.fixture
def loop():
    sizes = ((E, N, D), (E, N, D), (E, D, N), (S, D), (S, D), (D, S))
    experts = ExpertWeights(*(draw(*size, seed=seed) for seed, size in enumerate(sizes)))
    unrouted = LinearRouter.without_bias(torch.zeros(E, D))
    return ExpertLoop(experts, torch.arange(E * N).view(E, N), torch.arange(S), unrouted, K, 20, SILU)


@pytest.mark.parametrize("numbers", [2**26, 100])
def test_what_an_expert_takes_off_the_error(loop, numbers, monkeypatch):
    monkeypatch.setattr(expert_outputs, "MAX_ELEMENTS", numbers)
    x_TD, target_TD = draw(T, D, seed=7), draw(T, D, seed=8)
    missing_TD = target_TD - loop.always_on_output(x_TD)
    drops_TE = error_drops(loop, x_TD, target_TD)
    for expert in range(E):
        left_TD = missing_TD - loop.expert_outputs(x_TD)[:, expert]
        wanted_T = 1 - left_TD.square().sum(1) / missing_TD.square().sum(1)
        torch.testing.assert_close(drops_TE[:, expert], wanted_T.clamp_min(-1), rtol=1e-4, atol=1e-4)
    assert (drops_TE == -1).any()


def make_task(loop):
    """A token's target is the output of expert 0, 1 or 2, by a linear function; expert 3 has large, useless outputs."""
    loud = loop.experts.down_EDN.clone()
    loud[3] *= 10
    loop = replace(loop, experts=replace(loop.experts, down_EDN=loud))
    inputs = [draw(200, D, seed=seed) for seed in range(20, 36)]
    true_DE = draw(D, 3, seed=5)
    targets = []
    for x_TD in inputs:
        outputs_TED = loop.expert_outputs(x_TD)
        best_T = (x_TD @ true_DE).argmax(1)
        targets.append(outputs_TED[torch.arange(len(x_TD)), best_T] + loop.always_on_output(x_TD))
    return watch_pool(loop, targets, inputs)


def settings(method, steps=0):
    return RouterSettings(method, 0.1, 3000, steps, 0.0, 3, rate=0.02)


def test_fitted_routers_are_better_than_chance_and_no_worse_than_their_starts(loop):
    task = make_task(loop)
    fitted, _ = split(task, settings("error"))
    drops = ((task.inputs[index], task.drops[index]) for index in fitted)
    routers = [LinearRouter.without_bias(regress(task, drops).solve(0.1))]
    routers += [fit_pool_router(task, given) for given in (settings("random"), settings("error", steps=40))]
    every = range(len(task.inputs))
    loops = [replace(task.loop, router=one) for one in routers]
    start, random, found = (relative_error(one, task.inputs, task.wanted, every) for one in loops)
    assert found <= 1.05 * start
    assert found < 0.8 * random
