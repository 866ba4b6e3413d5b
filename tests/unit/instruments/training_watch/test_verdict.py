"""Findings of watch_model: planted faults are found and named, and their healthy twins report nothing."""

import math

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from unit.instruments.training_watch.watched_net import D, H, Net, V, batch, loss_of, train

from instruments.static_check.check import static_check
from instruments.training_watch.step_log import WatchConfig
from instruments.training_watch.verdict import History, check_loss_scale, judge_loss, judge_norms
from tiny_onn import watch_model


def test_a_loss_outside_autocast_that_overflows_is_caught_in_both_ways(tmp_path):
    """The loss is computed in float16 after a correct forward pass."""
    code = (
        "import torch\n"
        "from torch.nn import functional as F\n"
        "with torch.autocast('cpu', dtype=torch.float16):\n"
        "    logits = model(x)\n"
        "odds = logits.exp()\n"
        "loss = F.nll_loss(torch.log(odds / odds.sum(-1, keepdim=True)), y)\n"
        "loss.backward()\n"
    )
    (tmp_path / "train.py").write_text(code)
    found = [(found.line, found.code) for found in static_check(tmp_path / "train.py").findings]
    assert found == [(5, "LP108"), (6, "LP102"), (6, "LP108"), (6, "LP105"), (7, "LP302")]
    model = Net()
    model.head.weight.data *= 50  # logits near 20: they fit well into float16, their exponentials do not
    x, y = batch()
    space = {"model": model, "x": x, "y": y}
    with watch_model(model) as watch:
        exec(compile(code, "train.py", "exec"), space)
        (anomaly, *_rest) = watch.step(loss=space["loss"]).anomalies
    assert (anomaly.kind, anomaly.severity, anomaly.where[0]) == ("not_finite", "severe", "head")
    assert "in head, float16; last head, float16): compute it in float32, inside autocast" in anomaly.message


def test_a_scaler_that_finds_no_scale():
    model, kinds = Net(), []
    model.head.weight.register_hook(lambda grad: grad * math.inf)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = GradScaler("cpu", init_scale=2.0**9)
    with watch_model(model, optimizer, scaler) as watch:
        for _ in range(11):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = loss_of(model)
            kinds.append({(one.kind, one.severity) for one in watch.last.anomalies} if watch.last else None)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert kinds[:2] == [None, {("skipped", "note")}]
    assert kinds[4] == {("skipped", "note"), ("loss_scale", "warning")}  # loss scale 64
    assert ("falling_scale", "warning") in kinds[6]
    assert ("loss_scale", "severe") in kinds[10]  # loss scale 1


def test_check_loss_scale_alone():
    assert [found.severity for scale in (1.0, math.nan) for found in check_loss_scale(scale)] == ["severe", "severe"]
    assert check_loss_scale(2048.0, [2.0**power for power in (16, 15, 14, 14, 13, 12)]) == []
    assert check_loss_scale(GradScaler("cpu", init_scale=64.0, enabled=False)) == []
    assert [found.kind for found in check_loss_scale(GradScaler("cpu", init_scale=64.0))] == ["loss_scale"]


class Lora(Net):
    def __init__(self, outer=0.0):
        super().__init__()
        self.requires_grad_(False)
        self.down, self.up = nn.Linear(D, 2, bias=False), nn.Linear(2, H, bias=False)
        nn.init.constant_(self.up.weight, outer)

    def forward(self, x):
        return self.head(self.middle(self.norm(self.first(x) + self.up(self.down(x)))).tanh())


class ZeroResidual(Net):
    def __init__(self):
        super().__init__()
        nn.init.zeros_(self.middle.weight)
        nn.init.zeros_(self.middle.bias)

    def forward(self, x):
        h = self.first(x)
        return self.head(h + self.middle(self.norm(h)))


@pytest.mark.parametrize("rate", [0.05, "warm-up"])
@pytest.mark.parametrize("make", [Lora, ZeroResidual])
def test_weights_that_start_at_zero_are_not_dead(make, rate, caplog):
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    factor = (lambda step: 1.0) if rate == 0.05 else (lambda step: step / 2000)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    with watch_model(model, optimizer):
        for step in range(12):
            loss_of(model, step).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    assert caplog.messages == []


class Experts(nn.Module):
    """Each step uses one of two experts; the third is never used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.parts, self.head = nn.ModuleList(nn.Linear(D, H) for _ in range(3)), nn.Linear(H, V)
        self.count = 0

    def forward(self, x):
        self.count += 1
        return self.head(self.parts[self.count // 2 % 2](x))


@pytest.mark.parametrize("to_none", [True, False])
def test_experts_without_a_token_are_no_fault(caplog, to_none):
    model = Experts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = watch_model(model, optimizer)
    for step in range(12):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
    assert watch.next_step == 12
    assert caplog.messages == []


def test_what_lasts_is_logged_again_now_and_then(caplog):
    model = Net()
    with watch_model(model, config=WatchConfig(vanishing=1e6, exploding=1e9, repeat_steps=3)):
        train(model, 7)
    assert [message.split(":")[0] for message in caplog.messages] == ["step 2", "step 5"]


def test_a_vanished_gradient_lasts_and_a_dead_layer_is_reported_once():
    for norms, expected in (([1e-9] * 4, [0, 0, 1, 1]), ([1e-9, 4e-9, 2e-8, 9e-8], [0, 0, 0, 0])):
        history = History()
        found = [judge_norms({"a": norm, "b": norm}, WatchConfig(), history) for norm in norms]
        assert [len(one) for one in found] == expected
    history, layers = History(), {"a": 1.0, "b": 1e-8, "c": 2.0}
    assert [len(judge_norms(layers, WatchConfig(), history)) for _ in range(6)] == [0, 0, 1, 0, 0, 0]


def test_a_loss_above_its_start_is_reported_once_and_a_noisy_or_negative_one_is_not():
    for loss, expected in (
        (lambda step: 2.0 + (step > 9), 1),
        (lambda step: 2.0 + step % 5, 0),
        (lambda step: 2.0 - step / 99, 0),
        (lambda step: step - 3.0, 0),
    ):
        history = History()
        assert sum(len(judge_loss(loss(step), history)) for step in range(99)) == expected
