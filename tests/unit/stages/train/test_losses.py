import pytest
import torch

from stages import losses
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


def test_the_gradient_is_computed_once_since_it_overwrites_the_teachers_logits(batch):
    student, teacher, labels = batch
    found = prediction_distance(student, teacher, predicts(labels))
    torch.autograd.grad(found, student, retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        torch.autograd.grad(found, student)


def test_half_precision_of_teacher_or_student(batch):
    student, teacher, labels = batch
    counts = predicts(labels)
    expected = prediction_distance(student, teacher.bfloat16().float(), counts)
    (wanted,) = torch.autograd.grad(expected, student)
    (gradient,) = torch.autograd.grad(prediction_distance(student, teacher.bfloat16(), counts), student)
    torch.testing.assert_close(gradient, wanted)
