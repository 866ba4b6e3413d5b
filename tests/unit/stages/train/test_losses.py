import pytest
import torch

from stages import losses as divergence
from stages.losses import prediction_distance
from stages.train.objective import predicts


@pytest.fixture
def batch():
    draw = torch.Generator().manual_seed(3)
    student, teacher = (torch.randn(2, 5, 7, generator=draw, requires_grad=True) for _ in range(2))
    labels = torch.tensor([[1, 2, -100, 4, 5], [3, 3, 0, -100, -100]])
    return student, teacher.detach(), labels


def test_positions_that_predict_something(batch):
    _, _, labels = batch
    assert predicts(labels).tolist() == [[True, False, True, True, False], [True, True, False, False, False]]


@pytest.mark.parametrize("chunk", [1024, 2])
def test_divergence_equals_its_definition_with_gradients(batch, chunk, monkeypatch):
    monkeypatch.setattr(divergence, "CHUNK_TOKENS", chunk)
    student, teacher, labels = batch
    counts = predicts(labels)
    found = prediction_distance(student, teacher, counts)
    (gradient,) = torch.autograd.grad(found, student)
    ours, theirs = (x[counts].softmax(-1) for x in (student, teacher))
    expected = (theirs * (theirs / ours).log()).sum()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, student)[0])


def test_a_student_like_its_teacher_is_at_distance_0(batch):
    _, teacher, labels = batch
    assert prediction_distance(teacher, teacher, predicts(labels)).abs() < 1e-6
