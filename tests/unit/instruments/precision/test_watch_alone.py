"""`watch_model(model)` in a user's own loop, without further calls: faults, each with a healthy twin."""

import gc
import math
import subprocess
import sys
import weakref
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional
from unit.instruments.precision.watched_net import D, H, Net, V, batch

from instruments.precision import watch_model
from instruments.training_watch.step_log import describe, read_step_log


def train(model, steps=6, *, lossy=functional.cross_entropy, rate=0.05, clip=None, change=None, make=torch.optim.SGD):
    """A training loop without any call of the watch."""
    optimizer = make(model.parameters(), lr=rate)
    for step in range(steps):
        if change is not None:
            change(step)
        x, y = batch(step)
        loss = lossy(model(x), y)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()


def kinds(path):
    return [(line["step"], found["kind"]) for line in read_step_log(path) for found in line["anomalies"]]


def test_a_loop_without_calls_is_judged(tmp_path, caplog):
    model, twin = Net(), Net()
    watch_model(model, log=tmp_path / "log.jsonl")

    def spoil(step):
        if step == 4:
            model.middle.weight.data[2, 3] = math.nan

    train(model, 4)
    lines = read_step_log(tmp_path / "log.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert caplog.messages == []
    train(twin, 4)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    x, y = batch(0)
    functional.cross_entropy(Net()(x), y)
    low, high = lines[0]["outputs"]["first"]
    seen = Net().first(x)
    assert (low, high) == pytest.approx((seen.min().item(), seen.max().item()))
    train(model, 6, change=spoil)
    assert kinds(tmp_path / "log.jsonl")[0] == (8, "not_finite")
    assert "NaN first in the output of middle (float32); finite until norm" in caplog.messages[0]


def test_nothing_grows_without_steps_and_a_forgotten_watch_dies_with_its_model():
    model = Net()
    watch = weakref.ref(watch_model(model))
    for step in range(150):
        model(batch(step)[0])
        model.first(batch(step)[0])  # does not pass through the model
    assert len(watch().measurement.peaks) < 2 * 64 + 4
    gc.collect()  # frees the models of other tests
    unscale = GradScaler.unscale_
    watch().remove()
    assert GradScaler.unscale_ is not unscale
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    other = Net()
    watch = weakref.ref(watch_model(other))
    del other
    gc.collect()
    assert watch() is None


def test_weights_changed_by_hand(tmp_path):
    model = Net()
    with watch_model(model, log=tmp_path / "log.jsonl"):
        norms = []
        for step in range(4):
            x, y = batch(step)
            functional.cross_entropy(model(x), y).backward()
            norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
            for parameter in model.parameters():
                parameter.data -= 0.1 * parameter.grad
                parameter.grad = None
    lines = read_step_log(tmp_path / "log.jsonl")
    assert [line["gradient_norm"] for line in lines] == pytest.approx(norms, rel=1e-6)


def test_accumulated_batches_are_one_step(tmp_path):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    watch = watch_model(model, log=tmp_path / "log.jsonl")
    for step in range(6):
        functional.cross_entropy(model(batch(step)[0]), batch(step)[1]).backward()
        if step % 3 == 2:
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
            optimizer.step()
            assert watch.last.gradient_norm == pytest.approx(norm, rel=1e-6)
            optimizer.zero_grad()
    assert watch.next_step == 2


@pytest.mark.parametrize("fused", [False, True])
def test_the_scaler_is_found(fused):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, fused=fused)
    scaler = GradScaler("cpu", init_scale=2.0**40, growth_interval=3)
    watch = watch_model(model)
    seen, found = [], []
    for step in range(40):
        with torch.autocast("cpu", torch.float16):
            loss = functional.cross_entropy(model(batch(step)[0]), batch(step)[1])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append(watch.last.loss_scale)
        found += [one.kind for one in watch.last.anomalies]
    assert watch.next_step == 40
    assert seen[:2] == [2.0**40, 2.0**39]
    assert found[0] == "skipped"
    assert set(found) <= {"skipped", "falling_scale"}
    assert 1e-3 < watch.last.gradient_norm < 10
    rises = sum(after > before for before, after in pairwise(seen))
    falls = sum(after < before for before, after in pairwise(seen))
    assert (watch.last.scale_rises, watch.last.scale_falls) == (rises, falls)
    assert rises
    assert falls > 5
    line = watch.last.record(layers=False)
    assert f"loss scale: {rises} rises, {falls} falls\n" in describe([line])


class Deaf(Net):
    """Unless healthy: `lost` runs, but its outputs are detached; `never` is not called."""

    def __init__(self, *, healthy=False):
        super().__init__()
        self.lost, self.never, self.healthy = nn.Linear(H, H), nn.Linear(2, 3), healthy

    def forward(self, x):
        h = self.first(x)
        side = self.lost(h)
        if self.healthy:
            return self.head(h + side) + functional.pad(self.never(h[:, :2]), (0, V - 3))
        return self.head(self.middle(self.norm(h)).tanh() + side.detach())


def test_parameters_that_never_get_a_gradient_are_named_once(tmp_path, caplog):
    watch = watch_model(Deaf(), log=tmp_path / "log.jsonl")
    train(watch.measurement.model, 8)
    assert kinds(tmp_path / "log.jsonl") == [(2, "no_gradient")]
    (message,) = caplog.messages
    assert message == (
        "step 2: 4 parameters that should learn have never got a gradient: lost.weight, lost.bias, never.weight, "
        "never.bias; lost.weight, lost.bias ran, but the loss does not depend on them"
    )
    watch.remove()
    assert len(caplog.messages) == 1
    caplog.clear()
    healthy = Deaf(healthy=True)
    del healthy.norm, healthy.middle
    with watch_model(healthy):
        train(healthy, 8)
    short = Deaf()
    with watch_model(short):
        train(short, 1)
    assert [message[:7] for message in caplog.messages] == ["step 0:"]  # a shorter run is judged at its end


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
    watch = watch_model(model)
    for step in range(12):
        functional.cross_entropy(model(batch(step)[0]), batch(step)[1]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
    assert caplog.messages == []
    watch.measurement.peaks.clear()


def test_norms_are_those_before_clipping(tmp_path, caplog):
    model = Net()
    watch_model(model, log=tmp_path / "log.jsonl")
    train(model, 6, clip=1e-3)
    lines = read_step_log(tmp_path / "log.jsonl")
    assert all(line["gradient_norm"] > 0.1 for line in lines)
    assert caplog.messages == []


def test_where_clipping_hides_the_norms_it_says_so(caplog):
    model = Net()
    with watch_model(model) as watch:
        for step in range(6):
            model.zero_grad()
            functional.cross_entropy(model(batch(step)[0]), batch(step)[1]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            watch.step()
    (message,) = caplog.messages
    assert message.startswith("step 2: the gradient norm is 0.001 in 3 steps, while the layers' change: gradients are ")
    caplog.clear()
    with watch_model(model) as watch:  # the same batch in every step, not clipped
        for _ in range(6):
            model.zero_grad()
            functional.cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
            watch.step()
    assert caplog.messages == []


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
def test_what_starts_at_zero_is_not_dead(make, rate, caplog):
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    factor = (lambda step: 1.0) if rate == 0.05 else (lambda step: step / 2000)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    with watch_model(model):
        for step in range(12):
            functional.cross_entropy(model(batch(step)[0]), batch(step)[1]).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    assert caplog.messages == []


def test_a_dead_layer_is_named_after_some_steps(caplog):
    model = Net()
    model.middle.weight.register_hook(lambda grad: grad * 1e-9)
    model.middle.bias.register_hook(lambda grad: grad * 1e-9)
    with watch_model(model):
        train(model, 6)
    (message,) = caplog.messages
    assert message.startswith("step 2: no gradient to speak of in middle: at most 1e-06 of the median layer's ")
    caplog.clear()
    stuck = Lora()
    stuck.up.requires_grad_(False)  # its weights stay zero
    with watch_model(stuck):
        train(stuck, 6, make=lambda _parameters, lr: torch.optim.SGD([*stuck.down.parameters()], lr=lr))
    assert "the gradient vanishes" in caplog.messages[0]


@pytest.mark.parametrize("act", [nn.Sigmoid, nn.ReLU])
def test_a_gradient_that_vanishes_on_its_way_back(act, caplog):
    torch.manual_seed(0)
    layers = [part for width in [D] + [H] * 11 for part in (nn.Linear(width, H), act())]
    model = nn.Sequential(*layers, nn.Linear(H, V))
    if act is nn.ReLU:
        for layer in model[::2]:
            nn.init.kaiming_normal_(layer.weight)
    with watch_model(model):
        train(model, 4)
    if act is nn.ReLU:
        assert caplog.messages == []
    else:
        (message,) = caplog.messages
        assert message.startswith("step 2: gradient norms below 1e-06: 0 (")


def test_a_summed_loss_does_not_explode_but_growth_does(caplog):
    def summed(scores, y):
        return 1e4 * functional.cross_entropy(scores, y, reduction="sum")

    model = Net()
    with watch_model(model):
        train(model, 12, lossy=summed, rate=1e-7)
    assert caplog.messages == []
    growing, factor = Net(), [0.1]

    def times(scores, y):
        factor[0] *= 2.5
        return factor[0] * functional.cross_entropy(scores, y)

    with watch_model(growing):
        train(growing, 12, lossy=times, rate=1e-9)
    assert "the gradient explodes: its norm is " in caplog.messages[0]
    assert "times the usual" in caplog.messages[0]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # raised by torch itself during tracing
@pytest.mark.parametrize("how", ["wrapped", "in place", "before", "part"])
def test_under_torch_compile_it_says_that_outputs_are_unseen(how, caplog):
    model = Net()
    torch._dynamo.reset()
    trained = torch.compile(model, backend="eager", fullgraph=True) if how in {"wrapped", "before"} else model
    if how == "part":
        model.middle = torch.compile(model.middle, backend="eager", fullgraph=True)
    if how == "in place":
        model.compile(backend="eager", fullgraph=True)
    watch = watch_model(model if how == "before" else trained)
    train(trained, 5)
    (message,) = [record.message for record in caplog.records if record.name.startswith("instruments")]
    count = 1 if how == "part" else 4
    why = (
        "they were called in a way (torch.compile?) that" if how == "before" else "they run under torch.compile, which"
    )
    assert message.startswith(f"step {int(how == 'before')}: the outputs of {count} modules are unseen: {why}")
    assert watch.last.gradient_norm > 0.1
    assert watch.next_step == 5


def test_in_transformers_trainer_norms_are_those_before_clipping(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

    from instruments.precision import WatchCallback

    torch.manual_seed(0)
    sizes = {"n_embd": 24, "n_layer": 1, "n_head": 4, "n_positions": 16, "vocab_size": 31}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **sizes))
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(31, (12, 8)).unbind()]
    arguments = TrainingArguments(
        tmp_path, max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_grad_norm=1e-3,
        logging_steps=1, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    watching = WatchCallback(log=tmp_path / "log.jsonl")
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[watching])
    trainer.train()
    lines = read_step_log(tmp_path / "log.jsonl")
    entries = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    logged = [entry["grad_norm"] for entry in entries]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["gradient_norm"] for line in lines] == pytest.approx(logged, rel=1e-4)  # Trainer's are unclipped, too
    assert min(logged) > 0.1
    # Of all micro-batches, which compute shares of it.
    assert [line["loss"] for line in lines] == pytest.approx([entry["loss"] for entry in entries], rel=1e-4)
    assert [line["anomalies"] for line in lines] == [[], [], []]
    assert not any(module._forward_hooks for module in model.modules())


ALONE = """
import sys, time, torch
started, before = time.perf_counter(), set(sys.modules)
foreign = {"transformers", "jaxtyping", "safetensors", "matplotlib", "accelerate", "beartype", "tqdm", "pandas"}

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in foreign:
            raise ImportError(name)

sys.meta_path.insert(0, Refuse())
from instruments.precision import watch_model
seconds = time.perf_counter() - started
assert "torch.distributed.tensor" not in set(sys.modules) - before
model = torch.nn.Linear(3, 2)
with watch_model(model, log=sys.argv[1]):
    model(torch.ones(5, 3)).square().mean().backward()
print(seconds)
"""


def test_it_needs_torch_alone(tmp_path):
    words = [sys.executable, "-c", ALONE, str(tmp_path / "log.jsonl")]
    done = subprocess.run(words, cwd=Path(__file__).parents[4], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1.0  # 0.05 s on an idle core
    assert len(read_step_log(tmp_path / "log.jsonl")) == 1
