"""`watch_model` with optimizers that compute gradients themselves, by a closure."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from unit.instruments.precision.watched_net import Net, batch

from instruments.precision import watch_model
from instruments.training_watch.step_log import read_step_log


def norm_of(model):
    return nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]).item()


@pytest.mark.parametrize("given", ["argument", "keyword"])
def test_the_gradient_is_the_closures_not_the_one_before_it(given, tmp_path):
    """As in Lightning: a first micro-batch outside of the closure, the last one and the clipping in it."""
    model, norms = Net(), []
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with watch_model(model, log=tmp_path / "log.jsonl"):
        for step in range(3):
            x, y = batch(step)
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()

            def closure(x=x, y=y):
                loss = functional.cross_entropy(model(2 * x), y)
                loss.backward()
                norms.append(norm_of(model))
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
                return loss

            loss = optimizer.step(closure) if given == "argument" else optimizer.step(closure=closure)
            assert torch.is_tensor(loss)
    logged = [line["gradient_norm"] for line in read_step_log(tmp_path / "log.jsonl")]
    assert logged == pytest.approx(norms, rel=1e-5)


def test_a_step_with_several_evaluations_is_judged_by_the_first(tmp_path):
    model, norms = Net(), []
    optimizer = torch.optim.LBFGS(model.parameters(), 0.5, max_iter=4)
    with watch_model(model, log=tmp_path / "log.jsonl") as watch:
        for step in range(2):
            evaluations = []

            def closure(step=step, evaluations=evaluations):
                optimizer.zero_grad()
                loss = functional.cross_entropy(model(batch(step)[0]), batch(step)[1])
                loss.backward()
                evaluations.append(norm_of(model))
                return loss

            optimizer.step(closure)
            assert len(evaluations) > 1
            norms.append(evaluations[0])
    assert watch.next_step == 2
    logged = [line["gradient_norm"] for line in read_step_log(tmp_path / "log.jsonl")]
    assert logged == pytest.approx(norms, rel=1e-5)
