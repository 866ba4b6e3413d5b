"""Projection of a pool that all layers share."""

from dataclasses import replace

import pytest
import torch
from draws import draw
from integration.forked import as_workers

from models.experts import ExpertLoop, ExpertWeights
from models.routing import GateKind, LinearRouter
from stages.artifacts.carve import Partition
from stages.artifacts.experts import join_pool
from stages.calibration.alignment import column_scale
from stages.calibration.batches import LayerSample
from stages.project.config import ProjectConfig
from stages.project.pool import PoolFit, RoutedTokens, sweep_experts
from stages.project.stage import split_pool
from stages.routing.descent import RouterSettings

L, D, F, E, N, K, S = 3, 6, 20, 4, 5, 2, 2
SILU = torch.nn.functional.silu
PARTITION = Partition(
    F,
    torch.stack([torch.arange(start, start + N) for start in (0, 5, 2, 9)]).int(),
    torch.tensor([0, 0, 2, 2], dtype=torch.int32),
    torch.tensor([[18, 19]] * L, dtype=torch.int32),
    pooled=True,
)


def part(layer):
    count = PARTITION.given[layer]
    sizes = ((count, N, D), (count, N, D), (count, D, N), (S, D), (S, D), (D, S))
    return ExpertWeights(*(draw(*size, seed=10 * layer + seed) for seed, size in enumerate(sizes)))


@pytest.fixture
def parts():
    return [part(layer) for layer in range(L)]


@pytest.fixture
def loops(parts):
    return [
        ExpertLoop(
            experts, PARTITION.neurons, PARTITION.always_on[layer],
            LinearRouter.without_bias(draw(E, D, seed=50 + layer)), K, F, SILU, GateKind.SOFTMAX_OF_CHOSEN,
        )
        for layer, experts in enumerate(join_pool(parts))
    ]  # fmt: skip


@pytest.fixture
def samples():
    """Outputs are linear in the inputs; their size grows tenfold per layer."""
    found = []
    for layer in range(L):
        inputs = [draw(40, D, seed=100 + 10 * layer + batch) for batch in range(5)]
        matrix_DD = draw(D, D, seed=200 + layer) * 10.0**layer
        found.append(LayerSample(inputs, [x_TD @ matrix_DD for x_TD in inputs]))
    return found


def project(loops, samples, settings, method="random"):
    return pool_fit(samples, settings, method).project(loops)


def pool_fit(samples, settings=None, method="error", **workers):
    refit = RouterSettings(method, 0.1, 3000, 20, 0.0, 3, rate=0.02)
    return PoolFit(samples, [refit] * L, settings or ProjectConfig(), **workers)


def sweep(loops, samples, penalty, sweeps):
    layers = [RoutedTokens.of(loop, sample, range(5)) for loop, sample in zip(loops, samples, strict=True)]
    return sweep_experts(loops[0], layers, penalty, sweeps)


def test_what_is_joined_comes_apart_again(parts, loops):
    assert loops[0].experts.gate_END is loops[2].experts.gate_END
    for before, after in zip(parts, split_pool(loops, PARTITION), strict=True):
        assert all(torch.equal(getattr(after, name), tensor) for name, tensor in vars(before).items())


def test_sweeps_end_at_the_joint_least_squares_solution(loops, samples):
    """Many sweeps over single experts converge to the joint solution of all experts."""
    loops = [replace(loop, gate=GateKind.CONSTANT) for loop in loops]
    down_EDN = sweep(loops, samples, penalty=1e-6, sweeps=200)
    features, wanted = [], []
    for loop, sample in zip(loops, samples, strict=True):
        x_TD, y_TD = torch.cat(sample.inputs), torch.cat(sample.outputs)
        chosen_TK = loop.router.choose(x_TD, K)
        columns = []
        for expert in range(E):
            h_TN = loop.hidden(x_TD, loop.experts.gate_END[expert], loop.experts.up_END[expert])
            columns.append(h_TN * (chosen_TK == expert).any(1, keepdim=True))
        scale = y_TD.square().sum(1).mean().rsqrt()
        features.append(torch.cat(columns, 1) * scale)
        wanted.append((y_TD - loop.always_on_output(x_TD)) * scale)
    best = torch.linalg.lstsq(torch.cat(features).double(), torch.cat(wanted).double()).solution
    torch.testing.assert_close(down_EDN.movedim(2, 1).reshape(E * N, D).double(), best, rtol=1e-2, atol=1e-2)


def test_an_expert_that_nobody_chooses_stays(loops, samples):
    down_EDN = loops[0].experts.down_EDN
    away = torch.zeros(E)
    away[1] = -1e9
    shunning = [replace(loop, router=LinearRouter(loop.router.rows_ED, away)) for loop in loops]
    swept_EDN = sweep(shunning, samples, penalty=1e-2, sweeps=1)
    assert torch.equal(swept_EDN[1], down_EDN[1])
    assert not torch.equal(swept_EDN[0], down_EDN[0])


def test_alignment_lowers_the_error_and_says_so(loops, samples):
    settings = ProjectConfig(validation_share=0.2)
    projected, outcome = project(loops, samples, settings)
    assert outcome.penalty in settings.penalties
    assert outcome.rounds == 0
    ends = pool_fit(samples).layer_errors(projected, [2])
    assert outcome.errors["at the end"] == ends
    assert sum(ends) < sum(outcome.errors["as cut"])
    assert torch.equal(projected[0].experts.gate_END, loops[0].experts.gate_END)


def test_routers_are_fitted_to_the_aligned_experts(loops, samples):
    loops = pool_fit(samples).weigh(loops)
    still, plain = project(loops, samples, ProjectConfig(validation_share=0.2, rounds=0))
    moved, fitted = project(loops, samples, ProjectConfig(validation_share=0.2, rounds=2), "error")
    assert all(torch.equal(a.router.rows_ED, b.router.rows_ED) for a, b in zip(still, loops, strict=True))
    assert fitted.rounds > 0
    assert sum(fitted.errors["at the end"]) < sum(plain.errors["at the end"])
    assert not torch.equal(moved[0].router.rows_ED, loops[0].router.rows_ED)


def test_scaled_layers_still_share_their_experts(loops, samples):
    """Without alignment these go to gradient projection, which would move an expert of each layer on its own."""
    weighed = pool_fit(samples).weigh(loops)
    rerouted = pool_fit(samples).reroute(weighed, [loop.router for loop in loops])
    for layers in (weighed, rerouted):
        assert not torch.equal(layers[0].experts.down_EDN, loops[0].experts.down_EDN)
        assert all(loop.experts.down_EDN is layers[0].experts.down_EDN for loop in layers)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])  # 4: more workers than layers
def test_workers_that_have_some_layers_each_fit_the_pool_as_one_process_does(loops, samples, world):
    settings = ProjectConfig(validation_share=0.2, penalties=[1e-2, 1.0])

    def work(workers):
        mine = [sample if layer % world == workers.rank else None for layer, sample in enumerate(samples)]
        with_others, by_myself = pool_fit(mine, settings, workers=workers), pool_fit(samples, settings)
        shared, alone = with_others.weigh(loops), by_myself.weigh(loops)
        assert torch.equal(shared[0].experts.down_EDN, alone[0].experts.down_EDN)
        shared, outcome = with_others.project(shared)
        alone, expected = by_myself.project(alone)
        assert (outcome.penalty, outcome.rounds) == (expected.penalty, expected.rounds)
        assert outcome.penalty is not None
        for step, errors in expected.errors.items():
            assert outcome.errors[step] == pytest.approx(errors, rel=1e-5)
        for found, loop in zip(shared, alone, strict=True):
            torch.testing.assert_close(found.router.rows_ED, loop.router.rows_ED, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(found.experts.down_EDN, loop.experts.down_EDN, rtol=1e-5, atol=1e-5)

    as_workers(world, work)


def test_a_pool_is_scaled_for_the_tokens_of_all_its_layers(loops, samples):
    """As one layer that sees all tokens, if the layers have one router."""
    alike = [replace(loop, router=loops[0].router) for loop in loops]
    inputs = [x_TD for sample in samples for x_TD in sample.inputs]
    scale_EN = column_scale(replace(loops[0], neurons_EN=torch.arange(E * N).view(E, N)), inputs)
    torch.testing.assert_close(pool_fit(samples).gate_scale(alike).expand(E, N), scale_EN)
