import pytest
import torch
from operator_counts import Operators
from pico_moes import SIZES, make_moe

from models.training import AUTOCAST_IMPLEMENTATION, RouterWatch, Routing
from stages import losses
from stages.losses import prediction_distance
from stages.text.batches import TokenSequence, batch_sequences
from stages.train.config import TrainConfig
from stages.train.objective import Balance, Objective, RunningMetrics, predicts, sticky_loss

LOADS = [torch.tensor([[3, 1, 0], [0, 2, 2]]), torch.tensor([[1, 3, 0], [4, 0, 0]])]


def filled(*, pooled):
    tally = RunningMetrics(pooled)
    for load in LOADS:
        tally.add(load, language_model=torch.tensor(6.0), items=torch.tensor(3), tokens=torch.tensor(4), passes=1.0,
                  router_entropy=torch.tensor(0.5))  # fmt: skip
    return tally


def test_figures_are_means_over_what_was_counted():
    tally = filled(pooled=False)
    assert tally.collect() == {
        "language_model": 2.0,
        "router_entropy": 0.5,
        "load_max_over_mean": pytest.approx(4 / (8 / 3)),
        "load_max_over_mean_average": pytest.approx(1.5),
        "dead_experts": 1,
        "tokens": 8,
    }
    assert tally.collect() == {}
    pooled = filled(pooled=True).collect()  # layers of a pool load the same experts
    assert (pooled["load_max_over_mean"], pooled["dead_experts"]) == (pytest.approx(8 / (16 / 3)), 0)


@pytest.fixture
def batch():
    draw = torch.Generator().manual_seed(3)
    student, teacher = (torch.randn(2, 5, 7, generator=draw, requires_grad=True) for _ in range(2))
    labels = torch.tensor([[1, 2, -100, 4, 5], [3, 3, 0, -100, -100]])
    return student, teacher.detach(), labels


@pytest.mark.parametrize("tokens", [1000, 2])
def test_divergence_equals_its_definition_with_gradients(batch, tokens, monkeypatch):
    student, teacher, labels = batch
    monkeypatch.setattr(losses, "CHUNK_VALUES", tokens * student.shape[-1])
    counts = predicts(labels)
    found = prediction_distance(student, teacher.clone(), counts)
    (gradient,) = torch.autograd.grad(found, student)
    ours, theirs = (x[counts].softmax(-1) for x in (student, teacher))
    expected = (theirs * (theirs / ours).log()).sum()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, student)[0])


def test_half_precision_of_teacher_or_student(batch):
    student, teacher, labels = batch
    counts = predicts(labels)
    expected = prediction_distance(student, teacher.bfloat16().float(), counts)
    (wanted,) = torch.autograd.grad(expected, student)
    (gradient,) = torch.autograd.grad(prediction_distance(student, teacher.bfloat16(), counts), student)
    torch.testing.assert_close(gradient, wanted)


def test_a_single_expert_is_chosen_again_at_no_cost():
    chosen = Routing(torch.randn(4, 1), torch.zeros(4, 1, dtype=torch.long))
    assert sticky_loss([chosen], torch.arange(4), 4) == 0


@pytest.mark.parametrize("balance", ["loss", "selection_bias"])
def test_a_micro_batch_waits_at_most_twice_with_any_number_of_layers(balance, monkeypatch):
    found = []
    for layers in (2, 3):
        monkeypatch.setitem(SIZES, "num_hidden_layers", layers)
        model = make_moe("glm4_moe")
        model.set_experts_implementation(AUTOCAST_IMPLEMENTATION)
        objective = Objective(
            TrainConfig(z_weight=0.1, sticky_weight=0.1), RouterWatch(model), None, Balance(balance, 0.1)
        )
        (batch,) = batch_sequences([TokenSequence("", row, row) for row in ([1, 2, 3], [4, 5, 6, 7, 8])], 10, 0)
        inputs = {**batch.inputs(model.device), "labels": batch.labels, "rows": batch.rows(model.device)}
        items = torch.tensor(6)
        with Operators() as operators:
            objective.loss(model, inputs, items, parts=1, world=1).backward()
            objective.take_load()
        found.append(operators.waits)
    assert found[0] == found[1]
    assert found[0].total() <= 2
