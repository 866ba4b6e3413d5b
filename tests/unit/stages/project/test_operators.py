"""What project and assemble ask of a GPU: few operators, whatever the number of experts, and hardly a wait."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from draws import draw
from operator_counts import Operators, count_operators
from pico import write_pico
from transformers import AutoModelForCausalLM

from instruments import device
from models.experts import ExpertLoop, slice_experts
from models.ffn import DenseFFN, ffn_modules
from models.routing import GateKind, LinearRouter
from stages.calibration.alignment import column_scale, relative_error, sum_features
from stages.project.carved_model import CarvedModel
from stages.project.config import ProjectConfig
from stages.project.gradient_projection import GradientRounds
from stages.project.layer_pass import descend_experts, project_layer
from stages.routing.descent import RouterSettings
from stages.routing.fit import fit_router
from stages.routing.task import load_balance, set_logit_std, watch_experts
from stages.text.batches import TokenSequence, batch_sequences

D, N, K, S = 8, 3, 2, 4
DESCENT = ProjectConfig(descent_tokens=64, descent_steps=10)
REFIT = RouterSettings("error", 0.1, 1000, 10, 0.0, 1, rate=0.05, logit_std=0.3)


@pytest.fixture(autouse=True)
def _no_host(monkeypatch):
    monkeypatch.setattr(device, "HOSTS", set())


def cut_loop(ffn, experts):
    neurons_EN, always_S = torch.arange(S, ffn.width).view(experts, N), torch.arange(S)
    router = LinearRouter.without_bias(draw(experts, ffn.gate_FD.shape[1], seed=4))
    kept = slice_experts(ffn.projections, neurons_EN, always_S)
    return ExpertLoop(kept, neurons_EN, always_S, router, K, ffn.width, ffn.act, GateKind.SOFTMAX_OF_CHOSEN)


def make_layer(experts, batches=8):
    """A loop, the FFN from which it is cut, its inputs and its target outputs."""
    width = S + experts * N
    ffn = DenseFFN(draw(width, D, seed=1), draw(width, D, seed=2), draw(D, width, seed=3), torch.nn.functional.silu)
    inputs = [draw(90 + index, D, seed=10 + index) for index in range(batches)]
    return cut_loop(ffn, experts), ffn, inputs, [ffn(x_TD) for x_TD in inputs]


def more(few: Operators, many: Operators) -> tuple[int, Counter[str]]:
    """What the second call had in addition: operators, and waits."""
    return many.started.total() - few.started.total(), many.waits - few.waits


def count_step(experts):
    loop, _, inputs, wanted = make_layer(experts)
    return more(*(
        count_operators(descend_experts, loop, inputs, wanted, replace(DESCENT, descent_steps=steps), 0)
        for steps in (2, 3)
    ))  # fmt: skip


def test_a_step_of_descent_has_at_most_64_operators_and_no_wait():
    found, waits = count_step(experts=4)
    assert count_step(experts=7) == (found, waits)
    assert found <= 64
    assert not waits


def test_a_step_of_descent_on_a_cpu_with_amx_copies_no_batches_and_is_the_same(monkeypatch):
    loop, _, inputs, wanted = make_layer(experts=4)
    expected = descend_experts(loop, inputs, wanted, DESCENT, 0)
    monkeypatch.setattr(device, "HOSTS", {"cpu"})
    monkeypatch.setattr("models.experts.prefers_large_products", lambda _device: True)
    monkeypatch.setattr("stages.project.layer_pass.torch.cat", None)  # batches may be on the disk
    found = descend_experts(loop, inputs, wanted, DESCENT, 0)
    monkeypatch.undo()
    for name, weight in vars(found).items():
        torch.testing.assert_close(weight, getattr(expected, name))


def batch_passes(loop, ffn, inputs, wanted):
    """Passes over `count` batches."""
    return {
        "gate moments": lambda count: column_scale(loop, inputs[:count]),
        "error": lambda count: relative_error(loop, inputs[:count], wanted[:count], range(count)),
        "moments": lambda count: sum_features(loop, inputs[:count], wanted[:count], range(count)),
        "task": lambda count: watch_experts(ffn, loop.neurons_EN, loop.always_S, inputs[:count], K),
        "load": lambda count: load_balance(loop.router, inputs[:count], K),
        "logits": lambda count: set_logit_std(loop.router, inputs[:count], 0.3),
    }


@torch.no_grad()
def test_a_batch_has_at_most_40_operators_a_pass_and_no_wait():
    found = {}
    for experts in (4, 7):
        passes = batch_passes(*make_layer(experts))
        found[experts] = {name: more(*(count_operators(run, each) for each in (5, 6))) for name, run in passes.items()}
    assert found[4] == found[7]
    assert max(operators for operators, _ in found[4].values()) <= 40
    assert not any(waits for _, waits in found[4].values())


def test_a_step_of_router_descent_has_at_most_120_operators_and_no_wait():
    found = {}
    for experts in (4, 7):
        loop, ffn, inputs, _wanted = make_layer(experts)
        task = replace(watch_experts(ffn, loop.neurons_EN, loop.always_S, inputs, K), loop=loop)
        # Steps 17 and 18 of 17 and 18: both have as many evaluations.
        runs = (count_operators(fit_router, task, replace(REFIT, steps=steps)) for steps in (17, 18))
        found[experts] = more(*runs)
    assert found[4] == found[7]
    assert found[4][0] <= 120
    assert not found[4][1]


def test_the_waits_of_a_layer_are_independent_of_experts_and_batches():
    found = []
    for experts, batches in ((4, 8), (7, 8), (4, 13)):
        loop, _, inputs, wanted = make_layer(experts, batches)
        found.append(count_operators(project_layer, loop, REFIT, inputs, wanted, replace(DESCENT, rounds=0), 0).waits)
    assert found[0] == found[1] == found[2]


def test_project_gives_the_layer_of_the_loop(monkeypatch):
    loop, _, inputs, wanted = make_layer(experts=4)
    settings = replace(DESCENT, rounds=0)
    _, masked = project_layer(loop, REFIT, inputs, wanted, settings, 0)
    monkeypatch.setattr(device, "HOSTS", {"cpu"})
    _, looped = project_layer(loop, REFIT, inputs, wanted, settings, 0)
    assert masked.penalty == looped.penalty
    for name in ("error_start", "error_aligned", "error_end"):
        assert getattr(masked, name) == pytest.approx(getattr(looped, name), rel=1e-4), name


def count_round(folder, layers, experts):
    """A round of gradient projection."""
    source = write_pico(folder / f"{layers}_{experts}", "qwen3", layers=layers, intermediate=S + experts * N)
    dense = AutoModelForCausalLM.from_pretrained(source).eval().requires_grad_(False)
    carved = CarvedModel(dense, [cut_loop(DenseFFN.of(mlp), experts) for mlp in ffn_modules(dense)])
    ids = [torch.randint(1, 61, (7,), generator=torch.Generator().manual_seed(seed)).tolist() for seed in range(16)]
    text = batch_sequences([TokenSequence(f"sample {index}", row, row) for index, row in enumerate(ids)], 28, 0)
    rounds = GradientRounds(carved, text, ProjectConfig(round_tokens=14, validation_share=0.25), 0)
    velocity = [torch.zeros_like(weight) for weight in rounds._weights]

    def run(batches):
        for batch in batches:
            rounds._step(velocity, batch, 0.01)

    taught = carved.teach(rounds._rounds[:2])
    return more(*(count_operators(run, taught[:count]) for count in (1, 2)))


def test_a_round_of_gradient_projection_has_at_most_180_operators_a_layer_and_no_wait(tmp_path):
    (two, waits), (three, same), (others, _) = (count_round(tmp_path, *each) for each in ((2, 4), (3, 4), (3, 7)))
    assert three == others
    assert three - two <= 180
    assert not waits
    assert not same
