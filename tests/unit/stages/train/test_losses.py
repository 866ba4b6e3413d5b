import pytest
import torch
from torch.nn.functional import cross_entropy

from stages import losses as divergence
from stages.losses import prediction_distance
from stages.train.objective import hidden_distance, next_token_loss, predicts


@pytest.fixture
def batch():
    draw = torch.Generator().manual_seed(3)
    student, teacher = (torch.randn(2, 5, 7, generator=draw, requires_grad=True) for _ in range(2))
    labels = torch.tensor([[1, 2, -100, 4, 5], [3, 3, 0, -100, -100]])
    return student, teacher.detach(), labels


def test_positions_that_predict_something(batch):
    _, _, labels = batch
    assert predicts(labels).tolist() == [[True, False, True, True, False], [True, True, False, False, False]]


def test_next_token_loss_is_the_sum(batch):
    student, _, labels = batch
    expected = cross_entropy(student[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    torch.testing.assert_close(next_token_loss(student, labels), expected)


@pytest.mark.parametrize(("temperature", "chunk"), [(1.0, 1024), (2.5, 2)])
def test_divergence_equals_its_definition_with_gradients(batch, temperature, chunk, monkeypatch):
    monkeypatch.setattr(divergence, "CHUNK_TOKENS", chunk)
    student, teacher, labels = batch
    counts = predicts(labels)
    found = prediction_distance(student, teacher, counts, temperature)
    (gradient,) = torch.autograd.grad(found, student)
    ours, theirs = (x[counts].div(temperature).softmax(-1) for x in (student, teacher))
    expected = (theirs * (theirs / ours).log()).sum() * temperature**2
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, student)[0])


def test_a_student_like_its_teacher_is_at_distance_0(batch):
    _, teacher, labels = batch
    assert prediction_distance(teacher, teacher, predicts(labels)).abs() < 1e-6
    assert hidden_distance((teacher, teacher), (teacher, teacher), predicts(labels)) == 0


def test_hidden_distance_is_relative_to_the_teacher(batch):
    _, teacher, labels = batch
    far = (teacher, 3 * teacher, teacher)  # before the first layer, after it, after the second
    assert hidden_distance(far, (teacher, teacher, teacher), predicts(labels)) == pytest.approx(4 * 5 / 2)
