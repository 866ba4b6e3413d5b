from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle
from math import nan

import pytest
import torch
from integration.forked import as_workers
from pico import load_frozen, write_pico

from models.experts import ExpertLoop, ExpertWeights, slice_experts
from models.ffn import DenseFFN, ffn_modules
from models.routing import GateKind, LinearRouter
from stages.losses import save_memory
from stages.project import gradient_projection
from stages.project.carved_model import CarvedModel, TaughtBatch, gather_parts
from stages.project.config import ProjectConfig
from stages.project.gradient_projection import LENGTHS, SECTIONS, GradientRounds, divide, shuffle_rounds
from stages.text.batches import TokenSequence, batch_sequences

D, F, E, N, K = 24, 20, 4, 3, 2
SETTINGS = ProjectConfig(alpha=3.2, round_tokens=14, validation_share=0.25)  # large steps, since there are few tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_pico(tmp_path_factory.mktemp("pico"), "qwen3", layers=2, hidden=D, intermediate=F)


@pytest.fixture(scope="module")
def text():
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(1, 61, (7,), generator=generator).tolist() for _ in range(64)]
    return batch_sequences([TokenSequence(f"sample {index}", row, row) for index, row in enumerate(ids)], 28, 0)


@pytest.fixture
def carved(folder):
    dense = load_frozen(folder)
    # With weights of initial size, the FFNs hardly change the predictions.
    with torch.no_grad():
        for parameter in (p for mlp in ffn_modules(dense) for p in mlp.parameters()):
            parameter.mul_(30)
    neurons_EN, always_S = torch.arange(E * N).view(E, N), torch.arange(E * N, E * N + 4)
    loops = []
    for mlp in ffn_modules(dense):
        ffn = DenseFFN.of(mlp)
        rows_ED = torch.randn(E, D, generator=torch.Generator().manual_seed(len(loops)))
        experts, router = slice_experts(ffn.projections, neurons_EN, always_S), LinearRouter.without_bias(rows_ED)
        loops.append(ExpertLoop(experts, neurons_EN, always_S, router, K, F, ffn.act, GateKind.SOFTMAX_OF_CHOSEN))
    return CarvedModel(dense, loops)


def copy_experts(loop):
    return ExpertWeights(**{name: weight.clone() for name, weight in vars(loop.experts).items()})


def test_the_model_comes_nearer_to_the_dense_one_and_says_by_how_much(carved, text):
    started = [copy_experts(loop) for loop in carved.loops]
    rounds = GradientRounds(carved, text, SETTINGS, seed=0)
    validation = rounds._validation
    outcome = rounds.run()
    assert outcome.before > 1e-3
    assert outcome.after < 0.98 * outcome.before
    assert carved.divergence(validation) == pytest.approx(outcome.after, rel=1e-6)
    assert outcome.rounds == 24  # 16 of 64 sequences of 7 tokens are for validation; each round has two of the others
    assert outcome.tokens == 48 * 7
    assert 0 < outcome.length <= 0.04
    for before, loop in zip(started, carved.loops, strict=True):
        for name, weight in vars(loop.experts).items():
            assert not torch.equal(getattr(before, name), weight)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_what_saves_memory_changes_nothing(checkpointing, carved, text, monkeypatch):
    start = [weight.clone() for _, weight in carved.weights()]
    GradientRounds(carved, text, SETTINGS, seed=0).run()
    expected = [weight.clone() for _, weight in carved.weights()]
    for (_, weight), before in zip(carved.weights(), start, strict=True):
        weight.copy_(before)
    monkeypatch.setattr(gradient_projection, "GRADIENT_BYTES", 1)  # weights move while backward runs
    save_memory(carved.model, asked=checkpointing)
    GradientRounds(carved, text, SETTINGS, seed=0).run()
    assert all(torch.equal(a, b) for (_, a), b in zip(carved.weights(), expected, strict=True))


def test_steps_up_the_gradient_are_undone(carved, text):
    start = [copy_experts(loop) for loop in carved.loops]
    outcome = GradientRounds(carved, text, replace(SETTINGS, sign=1), seed=0).run()
    assert (outcome.rounds, outcome.tokens) == (0, 0)
    assert outcome.after == outcome.before
    for loop, experts in zip(carved.loops, start, strict=True):
        assert all(torch.equal(weight, getattr(experts, name)) for name, weight in vars(loop.experts).items())


class OneNeuron(CarvedModel):
    """One neuron of two weights, whose gradients are given; every step brings it nearer to the dense model."""

    def __init__(self, gradients, growth=(0.9,)):
        self.left, self.weight, self.distance = iter(gradients), torch.zeros(1, 1, 2), 1.0
        self.growth = cycle(growth)

    device = torch.device("cpu")

    def weights(self):
        return [("gate_END", self.weight)]

    def root_mean_squares(self):
        return [2.0]

    def teach(self, batches):
        return [TaughtBatch(batch, torch.zeros(*batch.input_ids.shape, 1)) for batch in batches]

    def backward(self, batch, weights, receive):
        receive(0, torch.tensor(next(self.left)).view(1, 1, 2))

    def divergence(self, taught):
        self.distance *= next(self.growth)
        return self.distance


def test_steps_follow_the_averaged_gradient_and_shorten_to_nothing(text):
    model = OneNeuron([(1.0, 0.0), (0.0, 1.0)])
    settings = replace(SETTINGS, beta=0.3, gradient_tokens=2 * 14)
    outcome = GradientRounds(model, text, settings, seed=0).run()
    assert (outcome.rounds, outcome.length) == (2, LENGTHS[0])
    first, second = 3.2 * 0.3 * LENGTHS[0] * 2 * torch.tensor([1.0, 1 / 2])
    turned = torch.tensor([0.8, 1.0])
    expected = -first * torch.tensor([1.0, 0.0]) - second * turned / turned.norm()
    torch.testing.assert_close(model.weight.flatten(), expected)


FINE = replace(SETTINGS, round_tokens=1, gradient_tokens=56 * 7, validation_share=0.01)  # rounds of one sequence


@pytest.mark.parametrize("growth", [(1.5,), (1.0, nan)])
def test_noise_costs_a_section_for_each_length_and_changes_nothing(growth, text):
    rounds = 64 * [(1.0, 0.0)]
    model = OneNeuron(rounds, growth)
    outcome = GradientRounds(model, text, FINE, seed=0).run()
    assert (outcome.rounds, outcome.before) == (0, outcome.after)
    assert len(rounds) - len([*model.left]) == len(LENGTHS) * (56 // SECTIONS)
    torch.testing.assert_close(model.weight.flatten(), torch.zeros(2))


def test_a_length_that_first_raises_the_kl_is_judged_when_it_has_fallen_to_nothing(text):
    model = OneNeuron(56 * [(1.0, 0.0)], growth=(1.0, 1.2, 0.8, *6 * [1.0]))
    outcome = GradientRounds(model, text, FINE, seed=0).run()
    assert (outcome.rounds, outcome.length, outcome.after) == (56, LENGTHS[0], pytest.approx(0.96))


def test_lengths_that_have_not_lowered_the_kl_in_the_end_are_undone(text):
    rounds = 200 * [(1.0, 0.0)]
    model = OneNeuron(rounds, growth=(1.0, *7 * [1.0], 1.1))
    outcome = GradientRounds(model, text, FINE, seed=0).run()
    assert (outcome.rounds, outcome.before, outcome.after) == (0, 1.0, 1.0)
    # The second length is given up behind the fifth section: 1.1 is too much for what is left of it.
    assert len(rounds) - len([*model.left]) >= 56 + 35
    torch.testing.assert_close(model.weight.flatten(), torch.zeros(2))


class TwoFormats(OneNeuron):
    """Its KL is `rounded` times as large where products are rounded; each step multiplies it by `inside` there."""

    def __init__(self, rounded, inside=0.9, outside=0.9):
        super().__init__(64 * [(1.0, 0.0)])
        self.factors, self.steps, self.formats, self.rounds = (1.0, rounded), (outside, inside), [], False

    @contextmanager
    def round(self):
        self.rounds = True
        yield
        self.rounds = False

    def backward(self, batch, weights, receive):
        self.formats.append(self.rounds)
        super().backward(batch, weights, receive)

    def divergence(self, taught):
        return self.factors[self.rounds] * self.steps[self.rounds] ** len(self.formats)


@pytest.mark.parametrize(("rounded", "used"), [(1.01, True), (0.99, True), (1.03, False), (float("nan"), False)])
def test_products_are_rounded_where_that_hardly_changes_the_kl(rounded, used, text, monkeypatch):
    model = TwoFormats(rounded)
    monkeypatch.setattr(gradient_projection, "prefers_large_products", lambda device: device.type == "cpu")
    monkeypatch.setattr(gradient_projection, "rounded_products", model.round)
    outcome = GradientRounds(model, text, SETTINGS, seed=0).run()
    assert model.formats == [used] * outcome.rounds
    assert (outcome.before, outcome.after) == (1.0, pytest.approx(0.9**outcome.rounds))  # both exact


@pytest.mark.parametrize(("inside", "outside"), [(0.9, 1.002), (1.1, 0.9)])  # the second: given up half-way
def test_what_only_one_number_format_calls_better_is_undone(inside, outside, text, monkeypatch):
    model = TwoFormats(1.001, inside=inside, outside=outside)
    monkeypatch.setattr(gradient_projection, "prefers_large_products", lambda device: True)
    monkeypatch.setattr(gradient_projection, "rounded_products", model.round)
    outcome = GradientRounds(model, text, SETTINGS, seed=0).run()
    assert any(model.formats)
    assert (outcome.rounds, outcome.tokens, outcome.before, outcome.after) == (0, 0, 1.0, 1.0)
    torch.testing.assert_close(model.weight.flatten(), torch.zeros(2))


def test_rounds_take_every_sequence_once_and_no_more_tokens_than_asked(text):
    rounds = shuffle_rounds(text, SETTINGS, seed=2)
    names = [name for batch in rounds for name in batch.names]
    assert sorted(names) == sorted(name for batch in text for name in batch.names)
    assert names != sorted(names)
    assert {batch.tokens for batch in rounds} == {14}
    assert sum(batch.tokens for batch in shuffle_rounds(text, replace(SETTINGS, gradient_tokens=20), seed=2)) == 28
    assert len(shuffle_rounds(text, replace(SETTINGS, round_tokens=1), seed=2)) == 64


def test_sections_are_of_nearly_equal_length():
    assert [len(part) for part in divide(56, SECTIONS)] == [7] * 8
    assert [list(part) for part in divide(3, 8)] == [[0], [1], [2]]
    assert [index for part in divide(19, 8) for index in part] == [*range(19)]


# 7: more workers than experts and than always-on neurons.
@pytest.mark.parametrize(
    ("world", "checkpointing"), [(2, False), (2, True), pytest.param(7, True, marks=pytest.mark.slow)]
)
def test_workers_that_hold_some_experts_each_move_them_as_one_process_does(carved, text, world, checkpointing):
    dense, whole = carved.model, carved.loops
    save_memory(dense, asked=checkpointing)
    settings = replace(SETTINGS, gradient_tokens=4 * 14)

    def work(workers):
        copies = [replace(loop, experts=copy_experts(loop)) for loop in whole]  # a part may be a view
        parts = [loop.part(workers.rank, workers.world) for loop in copies]
        assert sum(workers.gather(sum(len(part.neurons_EN) for part in parts))) == len(whole) * E
        shared = CarvedModel(dense, parts, workers)
        outcome = GradientRounds(shared, text, settings, seed=0).run()
        gathered = gather_parts(shared.loops, workers)
        alone = CarvedModel(dense, whole)
        expected = GradientRounds(alone, text, settings, seed=0).run()
        assert expected.after < expected.before
        assert outcome.rounds == expected.rounds > 0
        assert outcome.after == pytest.approx(expected.after, rel=1e-5)
        if workers.leads:
            for found, loop in zip(gathered, alone.loops, strict=True):
                assert torch.equal(found.neurons_EN, loop.neurons_EN)
                assert torch.equal(found.always_S, loop.always_S)
                for name, weight in vars(loop.experts).items():
                    torch.testing.assert_close(getattr(found.experts, name), weight, rtol=1e-5, atol=1e-5)

    as_workers(world, work)
