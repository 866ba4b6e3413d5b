import pytest
import torch
from torch import nn

from stages.train.config import TrainConfig
from stages.train.objective import make_schedule, stretch


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).view(3, 2))
        self.register_buffer("e_score_correction_bias", torch.tensor([1.0, -2.0, 0.5]))


def test_spread_grows_linearly_and_then_stays_and_factors_multiply_up_to_it():
    schedule, product = make_schedule(0.1, 0.5, 4), 1.0
    spreads = [0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5]
    assert [schedule.at(step) for step in range(7)] == pytest.approx(spreads)
    for step in range(1, 7):
        product *= schedule.factor(step)
        assert 0.1 * product == pytest.approx(spreads[step])


@pytest.mark.parametrize(("start", "end"), [(0.1, 0.0), (0.1, 0.05), (1.0, TrainConfig().logit_std)])
def test_spread_never_shrinks(start, end):
    """The last case is a carve with sigmoid gates and default settings."""
    schedule = make_schedule(start, end, 5)
    assert [schedule.factor(step) for step in (1, 5, 9)] == [1.0, 1.0, 1.0]
    assert schedule.at(9) == start


def test_stretching_scales_rows_and_bias_and_no_choice():
    router = Router()
    before = router.weight.detach().clone()
    stretch([router], 3.0)
    assert torch.equal(router.weight, 3 * before)
    assert torch.equal(router.e_score_correction_bias, torch.tensor([3.0, -6.0, 1.5]))
    assert router.weight.requires_grad
