"""watch_model in training loops: which steps it sees, by which hooks, and that nothing else changes."""

import gc
import math
import weakref
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional
from unit.instruments.training_watch.watched_net import (
    D,
    H,
    Net,
    batch,
    clipped_step,
    hooks_of,
    loss_of,
    norm_of,
    train,
)

from instruments.errors import ConfigError, NumericsError
from instruments.training_watch.step_log import WatchConfig, read_step_log
from tiny_onn import WatchCallback, watch_model


@pytest.mark.parametrize("how", ["optimizer", "step", "step(optimizer)", "nothing given", "by hand"])
def test_every_step_is_judged_before_clipping_and_training_does_not_change(how, tmp_path, caplog):
    model, twin, norms = Net(), Net(), []
    train(twin, 4, clip=1e-3)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    watch = watch_model(model, optimizer if how == "optimizer" else None, log=tmp_path / "log.jsonl")
    for step in range(4):
        loss = loss_of(model, step)
        loss.backward()
        norms.append(norm_of(model))
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        if how.startswith("step"):
            report = watch.step(optimizer, loss=loss) if "(" in how else watch.step(loss=loss)
            assert (report.step, report.loss) == (step, loss.item())
        if how == "by hand":
            for parameter in model.parameters():
                parameter.data.add_(parameter.grad, alpha=-0.05)
                parameter.grad = None
        else:
            optimizer.step()
            optimizer.zero_grad()
    watch.remove()
    lines = read_step_log(tmp_path / "log.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert [line["gradient_norm"] for line in lines] == pytest.approx(norms, rel=1e-6)
    assert ["layers" in line for line in lines] == [True, False, False, False]
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    assert caplog.messages == []
    assert hooks_of(model) == list(optimizer._optimizer_step_post_hooks) == []


def test_norms_of_layers_and_ranges_of_outputs():
    model = Net()
    with watch_model(model) as watch:
        loss_of(model).backward()
        report = watch.step()
    expected = {name: norm_of(part) for name, part in model.named_children()}
    assert list(report.layers) == list(expected)
    assert report.layers == pytest.approx(expected, rel=1e-6)
    seen = model.first(batch()[0])
    assert report.outputs["first"] == (seen.min().item(), seen.max().item())


@pytest.mark.parametrize("every", [1, 3])
def test_outputs_are_watched_at_every_nth_step_and_gradients_at_all(every):
    """Also the first that is not finite, which with `every` is found by the loss and gradients alone."""
    model, seen = Net(), []
    with watch_model(model, config=WatchConfig(every_steps=every)) as watch:
        for step in range(7):
            if step == 5:
                model.head.weight.data[0] = math.nan
            loss_of(model, step).backward()
            report = watch.step()
            seen.append((bool(report.outputs), report.gradient_norm > 0, [one.kind for one in report.anomalies]))
            model.zero_grad()
    assert [step for step, (outputs, *_) in enumerate(seen) if outputs] == [*range(0, 7, every)]
    assert all(norm and kinds == [] for _, norm, kinds in seen[:5])
    assert all("not_finite" in kinds for *_, kinds in seen[5:])
    with pytest.raises(ConfigError):
        watch_model(model, config=WatchConfig(every_steps=0))
    assert hooks_of(model) == []


def test_nothing_grows_without_steps_and_a_forgotten_watch_dies_with_its_model():
    model = Net()
    watch = watch_model(model)
    for step in range(150):
        model(batch(step)[0])
        model.first(batch(step)[0])  # does not pass through the model
    assert len(watch.measurement.peaks) < 2 * 64 + 4
    watch.remove()
    other, backward = Net(), torch.autograd.backward
    watch = weakref.ref(watch_model(other, torch.optim.SGD(other.parameters(), 0.1)))
    assert torch.autograd.backward is not backward
    del other
    gc.collect()
    assert watch() is None
    assert torch.autograd.backward is backward


def test_accumulated_batches_are_one_step_and_evaluation_none():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    watch = watch_model(model, optimizer)
    for step in range(6):
        if step % 3 < 2:
            loss_of(model, step).backward()
        else:
            clipped_step(watch, loss_of(model, step), optimizer, model)
            assert watch.last.anomalies == ()
        with torch.no_grad():
            model(torch.full((3, D), torch.nan))
    assert watch.next_step == 2


@pytest.mark.parametrize("how", ["given", "step", "explicit unscale"])
def test_a_scaler_that_searches_its_scale(how):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scaler = GradScaler("cpu", init_scale=2.0**40, growth_interval=3)
    watch = watch_model(model) if how == "step" else watch_model(model, optimizer, scaler)
    reports = []
    for step in range(40):
        with torch.autocast("cpu", torch.float16):
            loss = loss_of(model, step)
        scaler.scale(loss).backward()
        if how == "explicit unscale":
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        if how == "step":
            watch.step(optimizer, scaler, loss=loss)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        reports.append(watch.last)
    watch.remove()
    assert watch.next_step == 40
    seen = [report.loss_scale for report in reports if report]
    if how == "step":  # else a skipped step is seen at the next forward pass
        assert seen[:2] == [2.0**40, 2.0**39]
        assert [one.kind for one in reports[0].anomalies] == ["skipped"]
    assert {one.kind for report in reports if report for one in report.anomalies} <= {"skipped", "falling_scale"}
    assert sum(b < a for a, b in pairwise(seen)) > 5
    assert 1e-3 < watch.last.gradient_norm < 10


def test_norms_with_a_scaler_are_those_of_float32():
    model, twin = Net(), Net()
    scaler = GradScaler("cpu", init_scale=4096.0)
    with watch_model(model, scaler=scaler) as watch:
        with torch.autocast("cpu", torch.float16):
            loss = loss_of(model)
        scaler.scale(loss).backward()
        report = watch.step(loss=loss)
    loss_of(twin).backward()
    assert (report.loss, report.loss_scale, report.anomalies) == (loss.item(), 4096.0, ())
    assert report.gradient_norm == pytest.approx(norm_of(twin), rel=0.01)


def test_two_optimizers_of_one_backward_pass_share_a_step(caplog):
    model = Net()
    for parameter in model.norm.parameters():
        parameter.register_hook(lambda grad: grad * 1e-9)
    body, head = nn.ModuleList([model.first, model.norm, model.middle]), model.head
    optimizers = [torch.optim.SGD(body.parameters(), 0.01), torch.optim.AdamW(head.parameters(), 0.01)]
    with watch_model(model, optimizers) as watch:
        for step in range(4):
            loss_of(model, step).backward()
            norms = norm_of(body), norm_of(head)
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            for optimizer, norm in zip(optimizers, norms, strict=True):
                optimizer.step()
                assert watch.last.gradient_norm == pytest.approx(norm, rel=1e-5)
                assert watch.last.step == step
                assert "head" in watch.last.outputs
            model.zero_grad()
    (message,) = caplog.messages
    assert message.startswith("step 2: no gradient to speak of in norm: ")


def test_a_generator_is_compared_with_its_own_earlier_steps(caplog):
    torch.manual_seed(0)
    generator, critic = nn.Linear(D, H), nn.Linear(H, 1)
    both = nn.ModuleDict({"generator": generator, "critic": critic})  # is never called itself
    optimizers = [torch.optim.SGD(part.parameters(), 1e-6) for part in (generator, critic)]
    with watch_model(both, optimizers) as watch:
        for step in range(4):
            for scale, times, part, optimizer in ((0.1, 5, critic, optimizers[1]), (-1e3, 1, generator, optimizers[0])):
                for _ in range(times):
                    clipped_step(watch, scale * critic(generator(batch(step)[0])).mean(), optimizer, part)
                    both.zero_grad()
            assert watch.next_step == 5 * step + 5
    assert caplog.messages == []


@pytest.mark.parametrize("how", ["actor", "another model"])
def test_gradients_that_are_zeroed_before_the_own_backward_pass_are_zeroed(how, caplog):
    """Passes of other parts come before; the actor's leaves gradients in the critic, too."""
    torch.manual_seed(0)
    critic, other, x = nn.Linear(D, 1), nn.Linear(D, D), batch()[0]
    mine, theirs = torch.optim.SGD(critic.parameters(), 1e-3), torch.optim.SGD(other.parameters(), 1e-3)
    with watch_model(critic, mine):
        for _ in range(8):
            made = other(x)
            mine.zero_grad()
            ((critic(x) - 1).square() + critic(made.detach()).square()).mean().backward()
            mine.step()
            for _ in range(3):
                theirs.zero_grad()
                (other(x) if how == "another model" else critic(other(x))).mean().backward()
                theirs.step()
    assert caplog.messages == []


def test_gradients_that_are_never_zeroed_are_reported_also_beside_another_model(caplog):
    model, other = Net(), Net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with watch_model(model, optimizer):
        for step in range(5):
            loss_of(model, step).backward()
            optimizer.step()
            loss_of(other, step).backward()
    assert [message for message in caplog.messages if "zero them" in message]


class InPlace(torch.optim.SGD):
    """Changes weights where torch does not see it, as the first Muon does."""

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad, alpha=-0.01)


def test_weights_of_an_optimizer_that_is_given_to_a_step_have_one(caplog):
    model = Net()
    optimizers = [InPlace(model.middle.parameters()), torch.optim.SGD(model.head.parameters(), 0.01)]
    model.first.requires_grad_(False)
    model.norm.requires_grad_(False)
    with watch_model(model) as watch:
        for step in range(8):
            loss_of(model, step).backward()
            for optimizer in optimizers:
                watch.step(optimizer)
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()
    assert caplog.messages == []


class Fields(dict):
    """Outputs of a model; pytree does not look inside."""


class Odd(Net):
    def forward(self, x):
        return Fields(scores=super().forward(x))

    def training_step(self, x):
        return super().forward(x)


@pytest.mark.parametrize("how", ["after an error", "dict", "training_step"])
def test_every_backward_pass_is_noticed(how):
    model = Odd()
    optimizer, broken = torch.optim.SGD(model.parameters(), 0.01), [True] * (how == "after an error")

    def fail(_grad):
        if broken:
            broken.clear()
            raise RuntimeError("out of memory")

    model.middle.weight.register_hook(fail)
    with watch_model(model, optimizer) as watch:
        if broken:
            with pytest.raises(RuntimeError, match="out of memory"):
                model.training_step(batch(0)[0]).sum().backward()
            optimizer.zero_grad()
        for step in range(2):
            scores = model(batch(step)[0])["scores"] if how == "dict" else model.training_step(batch(step)[0])
            clipped_step(watch, functional.cross_entropy(scores, batch(step)[1]), optimizer, model)


def test_an_optimizer_for_each_parameter_that_steps_in_the_backward_pass(caplog):
    model = Net()
    optimizers = {parameter: torch.optim.SGD([parameter], 0.01) for parameter in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    with watch_model(model, [*optimizers.values()]):
        for number in range(5):
            loss_of(model, number).backward()
    assert caplog.messages == []


def test_a_step_with_several_evaluations_is_judged_by_the_last():
    model, norms = Net(), []
    optimizer = torch.optim.LBFGS(model.parameters(), 0.5, max_iter=4)
    with watch_model(model, optimizer) as watch:
        for step in range(2):

            def closure(step=step):
                optimizer.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                norms.append(norm_of(model))
                return loss

            optimizer.step(closure)
            assert watch.last.gradient_norm == pytest.approx(norms[-1], rel=1e-5)
    assert len(norms) > watch.next_step == 2


def test_parameters_are_watched_from_the_step_on_at_which_they_are_unfrozen():
    model = Net()
    model.first.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with watch_model(model, optimizer) as watch:
        for step in range(4):
            model.first.requires_grad_(step >= 2)
            clipped_step(watch, loss_of(model, step), optimizer, model)
            assert ("first" in watch.last.layers) == (step >= 2)


def test_a_second_watch_of_a_model_ends_the_first(tmp_path, caplog):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        watch = watch_model(model, optimizer, log=tmp_path / "log.jsonl")
    assert caplog.messages == ["the model is watched already: the earlier watch ends at step 0"]
    train(model, 3, optimizer=optimizer)
    assert [line["step"] for line in read_step_log(tmp_path / "log.jsonl")] == [0, 1, 2]
    watch.remove()
    assert hooks_of(model) == []


def test_wrong_use_is_explained(caplog):
    model = Net()
    watch_model(model, torch.optim.SGD(Net().parameters(), 0.1)).remove()
    assert "no parameter of the optimizer is one of the model's" in caplog.messages[0]
    caplog.clear()
    with watch_model(model.requires_grad_(False)) as watch:
        with pytest.raises(ConfigError):
            watch.step(loss=torch.zeros(2))
        model(batch()[0])
        report = watch.step(loss=1.5)
    assert caplog.messages == ["no parameter requires a gradient: only outputs and the loss are watched"]
    assert (report.loss, report.gradient_norm, report.layers, report.anomalies) == (1.5, 0.0, {}, ())
    backward = torch.autograd.backward
    with pytest.raises(ConfigError):
        watch_model(model, SimpleNamespace(param_groups=[], step=print))  # no hooks for its steps
    assert (hooks_of(model), torch.autograd.backward) == ([], backward)


def test_other_code_may_wrap_backward_while_a_model_is_watched(monkeypatch):
    """And may put back what it has replaced, at any time."""
    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)  # restored after the test
    model, other = Net(), Net()
    with watch_model(other):
        ours = torch.autograd.backward
        torch.autograd.backward = partial(ours)
        with watch_model(model) as watch:
            loss_of(model).backward()
            assert watch.step().loss == loss_of(model).item()
    for put_back in (ours, partial(ours)):
        torch.autograd.backward = put_back
        with watch_model(model) as watch:
            loss_of(model).backward()
            assert watch.step().loss == loss_of(model).item()
    assert torch.autograd.backward is put_back


def test_norms_are_those_before_clipping_and_losses_those_of_all_micro_batches(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

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
    assert [line["loss"] for line in lines] == pytest.approx([entry["loss"] for entry in entries], rel=1e-4)
    assert [line["anomalies"] for line in lines] == [[], [], []]
    assert hooks_of(model) == []


def test_a_training_that_raised_can_begin_again_and_accelerates_scaler_is_found(tmp_path):
    model, callback, state = Net(), WatchCallback(log=tmp_path / "log.jsonl"), SimpleNamespace(global_step=0)
    arguments = SimpleNamespace(world_size=1, average_tokens_across_devices=True)
    callback.on_train_begin(arguments, state, None, model=model)
    callback.on_train_begin(arguments, state, None, model=model)
    plain, scaler = torch.optim.SGD(model.parameters(), 0.1), GradScaler("cpu", init_scale=512.0)
    wrapped = SimpleNamespace(optimizer=plain, scaler=scaler, param_groups=plain.param_groups)
    for _ in range(2):
        scaler.scale(loss_of(model)).backward()
        callback.on_pre_optimizer_step(arguments, state, None, optimizer=wrapped)
        scaler.step(plain)
        scaler.update()
        plain.zero_grad()
        state.global_step += 1
    callback.on_train_end(None, state, None)
    lines = read_step_log(tmp_path / "log.jsonl")
    assert [(line["step"], line["loss_scale"], line["anomalies"]) for line in lines] == [(1, 512, []), (2, 512, [])]
    assert hooks_of(model) == []


def test_the_scaler_of_accelerates_optimizer_is_used():
    model = Net()
    plain, scaler = torch.optim.SGD(model.parameters(), 0.1), GradScaler("cpu", init_scale=512.0)
    with watch_model(model, SimpleNamespace(optimizer=plain, scaler=scaler)) as watch:
        loss = loss_of(model)
        scaler.scale(loss).backward()
        scaler.step(plain)
    assert (watch.last.loss_scale, watch.last.loss) == (512, pytest.approx(loss.item(), rel=1e-6))


@pytest.mark.parametrize("how", ["plain", "scaled", "two losses", "micro-batches", "torch.autograd.backward"])
def test_the_loss_is_what_backward_is_called_on(how):
    model, given = Net(), torch.autograd.backward
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    scaler = GradScaler("cpu", init_scale=2.0**7, enabled=how == "scaled")
    watch = watch_model(model, optimizer, scaler)
    for step in range(3):
        losses = [loss_of(model, 2 * step), loss_of(model, 2 * step + 1)]
        total = (losses[0] + losses[1]) / 2
        if how == "micro-batches":
            for loss in losses:
                (loss / 2).backward()
        elif how == "two losses":
            torch.autograd.backward([loss / 2 for loss in losses])
        elif how == "plain":
            total.backward()
        else:
            torch.autograd.backward(scaler.scale(total))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert watch.last.loss == pytest.approx(total.item(), rel=1e-6)
        batch_of_another = torch.ones(3, requires_grad=True)
        batch_of_another.sum().backward()
        assert watch.last.anomalies == ()
    assert watch.next_step == 3
    watch.remove()
    assert torch.autograd.backward is given


def test_a_lost_loss_with_finite_gradients_is_seen_and_can_stop_the_loop():
    model, offsets = Net(), iter([0.0, float("inf"), 0.0])
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with watch_model(model, optimizer, on_severe="raise") as watch, pytest.raises(NumericsError, match="loss is inf"):
        train(model, 3, lossy=lambda z, y: functional.cross_entropy(z, y) + next(offsets), optimizer=optimizer)
    assert (watch.next_step, watch.last.loss) == (2, float("inf"))
    assert hooks_of(model) == []
    with pytest.raises(ConfigError):
        watch_model(model, on_severe="stop")


def test_weights_may_get_another_shape_or_lose_their_memory():
    model = nn.Linear(D, H)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with watch_model(model, optimizer) as watch:
        for features in (D, D, 2 * D, 2 * D):
            model.weight.data, model.weight.grad = torch.ones(H, features), None
            model(torch.ones(3, features)).sum().backward()
            optimizer.step()
            model.weight.data = torch.empty(0)
    assert watch.next_step == 4
