import pytest
import torch
from pico_moes import make_moe

from models.training import AUTOCAST_IMPLEMENTATION, RouterWatch
from stages.train.config import TrainConfig
from stages.train.objective import Balance, Objective, RunningMetrics

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


def logits_after_backward(settings, teacher=None):
    """The logits before and after the backward pass of a micro-batch's loss."""
    model, kept = make_moe("qwen3_moe"), []
    model.set_experts_implementation(AUTOCAST_IMPLEMENTATION)
    model.lm_head.register_forward_hook(lambda _module, _args, output: kept.extend((output, output.detach().clone())))
    objective = Objective(settings, RouterWatch(model), teacher, Balance("none", 0.0))
    ids = torch.arange(14).view(2, 7)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    objective.loss(model, inputs, torch.tensor(12), parts=1, world=1).backward()
    return kept


@pytest.mark.parametrize(("precision", "dtype"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_the_gradient_overwrites_the_logits_which_stay_in_the_format_of_the_products(precision, dtype):
    logits, before = logits_after_backward(TrainConfig(precision=precision))
    assert logits.dtype == dtype
    assert not torch.equal(logits, before)


def test_the_divergence_finds_the_logits_unchanged():
    logits, before = logits_after_backward(TrainConfig(logits=1.0), make_moe("qwen3_moe"))
    assert torch.equal(logits, before)
