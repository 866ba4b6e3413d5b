"""Routers for the part of an expert's output that the always-on neurons do not predict."""

from dataclasses import replace

import pytest
import torch
from draws import draw

from models.experts import ExpertLoop
from models.ffn import DenseFFN
from models.routing import LinearRouter
from stages.calibration.alignment import align_down
from stages.project.config import ProjectConfig
from stages.routing import fit as residual
from stages.routing.descent import RouterSettings
from stages.routing.fit import Activations, distinct_neurons, fit_router, logs, regress, regress_on_always_on, split
from stages.routing.task import output_norms, watch_experts

D, S, E, N = 6, 2, 3, 4
F = S + E * N
SETTINGS = RouterSettings("error", 1e-6, 10_000, 0, 0.0, 1)


def make_task(*, echo, neurons_EN=None):
    """Make a routing task; with `echo`, expert 0's activations are ten times those of always-on neurons."""
    gate_FD = draw(F, D, seed=1)
    up_FD = draw(F, D, seed=2)
    gate_FD[:, 0] = 1  # most gates are open
    if echo:
        for neuron in range(S, S + N):
            gate_FD[neuron], up_FD[neuron] = gate_FD[neuron % S], 10 * up_FD[neuron % S]
    ffn = DenseFFN(gate_FD, up_FD, draw(D, F, seed=3), torch.nn.functional.silu)
    # A router without bias needs a shared input component to prefer an expert for all tokens.
    inputs = [draw(60, D, seed=seed) + 3 * torch.eye(D)[0] for seed in range(10, 18)]
    neurons_EN, always_S = torch.arange(S, F).view(E, N) if neurons_EN is None else neurons_EN, torch.arange(S)
    return watch_experts(ffn, neurons_EN, always_S, inputs, 1)


@pytest.mark.parametrize("numbers", [2**26, 50])
def test_the_residual_is_that_of_least_squares(numbers, monkeypatch):
    monkeypatch.setattr(residual, "MAX_ELEMENTS", numbers)
    task = make_task(echo=False)
    x_TD = torch.cat(list(task.inputs))
    found = Activations(task.loop, distinct_neurons(task.loop), x_TD)
    _, always, hidden = (torch.cat(parts) for parts in zip(*found, strict=True))
    assert hidden.shape == (len(x_TD), E * N)
    wanted = torch.linalg.lstsq(always.double(), hidden.double()).solution
    found_RS = regress_on_always_on(found, 1e-9)
    torch.testing.assert_close(found_RS.double().T, wanted, rtol=1e-3, atol=1e-3)


COPIES = torch.tensor([[2, 3, 4, 5], [5, 2, 6, 7], [7, 9, 2, 10]])  # 8 neurons, 4 more copies


@pytest.mark.parametrize(
    ("neurons_EN", "untied", "rows"),
    [(torch.arange(S, F).view(E, N), None, 12), (COPIES, None, 8), (COPIES, "down_EDN", 8), (COPIES, "up_END", 12)],
)
def test_the_norms_of_experts_are_those_of_their_own_neurons(neurons_EN, untied, rows):
    """Copies are computed once, unless their rows differ; each copy has the norm of its own column."""
    task = make_task(echo=False, neurons_EN=neurons_EN)
    loop = task.loop
    if untied:
        changed = getattr(loop.experts, untied).clone()
        changed[1] *= 2
        loop = replace(loop, experts=replace(loop.experts, **{untied: changed}))
    x_TD, routed = task.inputs[0], distinct_neurons(loop)
    ((_, _, hidden_tR),) = Activations(loop, routed, x_TD)
    assert hidden_tR.shape == (len(x_TD), rows)
    norms = [
        (loop.hidden(x_TD, gate_ND, up_ND) * down_DN.norm(dim=0)).norm(dim=1)
        for gate_ND, up_ND, down_DN in zip(
            loop.experts.gate_END, loop.experts.up_END, loop.experts.down_EDN, strict=True
        )
    ]
    torch.testing.assert_close(routed.expert_norms(hidden_tR), torch.stack(norms, dim=1))


def test_what_is_always_there_is_not_routed_for():
    """Alignment can replace the expert of largest norm: the norm's router chooses it, the residual's does not."""
    task = make_task(echo=True)
    x_TD = torch.cat(list(task.inputs))
    settings = ProjectConfig(penalties=[1e-4])
    fitted = [task.inputs[index] for index in split(task, SETTINGS)[0]]
    found = regress(task, ((inputs_TD, logs(output_norms(task.loop, inputs_TD))) for inputs_TD in fitted))
    by_norm = LinearRouter.without_bias(found.solve(SETTINGS.penalty))
    routers = {"norm": by_norm, "residual": fit_router(task, SETTINGS)}
    shares = {name: float((router.choose(x_TD, 1) == 0).float().mean()) for name, router in routers.items()}
    errors = {
        name: align_down(replace(task.loop, router=router), task.inputs, task.wanted, settings).error
        for name, router in routers.items()
    }
    assert shares["residual"] < 0.1
    assert shares["norm"] > 0.6
    assert errors["residual"] < 0.5 * errors["norm"]


@pytest.mark.parametrize(("numbers", "seen"), [(2**26, [100]), (60 * E * N, [60, 40, 60, 40])])
def test_it_uses_at_most_the_given_tokens(numbers, seen, monkeypatch):
    """Tokens in one piece are computed once; several pieces twice, for the prediction and for the residual."""
    monkeypatch.setattr(residual, "MAX_ELEMENTS", numbers)
    task, tokens = make_task(echo=False), []
    hidden = ExpertLoop.hidden
    monkeypatch.setattr(
        ExpertLoop, "hidden", lambda *given: (len(given[2]) == E * N and tokens.append(len(given[1]))) or hidden(*given)
    )
    fit_router(task, replace(SETTINGS, tokens=100))
    assert tokens == seen
