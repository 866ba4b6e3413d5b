import torch
from torch.nn.functional import normalize

from stages.cluster.views import join_views

F = 31


def draw(width, *, offset=0.0, seed=0):
    return torch.randn(F, width, generator=torch.Generator().manual_seed(seed)) + offset


def logit_std(rows_FC):
    return (rows_FC - rows_FC.mean(0)).square().sum(1).mean().sqrt()


def test_one_view_is_left_as_it_is():
    view_FC = draw(5)
    assert join_views([view_FC]) is view_FC


def test_every_view_tells_neurons_apart_equally_much():
    views = [draw(5), 1e4 * draw(9, seed=1), draw(7, offset=30.0, seed=2)]
    joint = join_views(views).split([5, 9, 7], dim=1)
    torch.testing.assert_close(torch.stack([logit_std(part) for part in joint]), torch.ones(3))
    for part, view in zip(joint, views, strict=True):
        torch.testing.assert_close(normalize(part, dim=1), normalize(view, dim=1))


def test_a_view_that_tells_nothing_does_not_count():
    same = torch.ones(F, 4)
    joint = join_views([draw(5), same])
    assert not joint[:, 5:].any()
    assert joint.isfinite().all()


def test_neurons_without_direction_in_one_view_still_have_the_other():
    dead = draw(9, seed=1)
    dead[:6] = 0
    joint = join_views([draw(5), dead])
    assert not joint[:6, 5:].any()
    assert joint[:6, :5].any(dim=1).all()
    torch.testing.assert_close(logit_std(joint[6:, 5:]), torch.tensor(1.0))
