"""Instruments report no problem in 25 healthy models of 6 kinds; the quick suite has one of each kind."""

import healthy_models
import pytest
import torch

from instruments.errors import NumericsError
from instruments.precision.verdict import Verdict
from tiny_onn import auto_diff, watch_model

QUICK = {"cnn residual", "lstm deep", "vit", "encoder torch", "decoder llama", "moe plain"}
NAMES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow, id=name) for name in healthy_models.MODELS]


@pytest.mark.parametrize("name", NAMES)
def test_auto_diff_is_content(name):
    for precision, mode in (("bf16", "autocast"), ("fp16", "cast")):
        try:
            diff = auto_diff(healthy_models.make(name), healthy_models.batch_of(name), precision=precision, mode=mode)
        except NumericsError as error:
            if "primitive descriptor" in str(error):
                pytest.skip("oneDNN has no such layer in 16 bits for this CPU")
            raise
        assert diff.verdict is Verdict.OK, str(diff)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("schedule", ["constant", "warm-up"])
def test_watch_model_is_content(name, schedule, caplog):
    model = healthy_models.make(name).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if schedule == "constant" else step / 1000)
    watch = watch_model(model)
    for step in range(8):
        healthy_models.loss_of(name, model, step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
    watch.remove()
    assert watch.next_step == 8
    assert [record.message for record in caplog.records if record.name.startswith("instruments")] == []
