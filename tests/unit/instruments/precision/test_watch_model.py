"""The monitor: planted faults are found and named, healthy trainings report nothing; real autocast and loss scaling."""

import json
import logging
import math

import pytest
import torch
from torch import nn
from torch.nn import functional
from unit.instruments.precision.watched_net import D, Net, T, batch

from instruments.errors import ConfigError
from instruments.static_check.check import static_check
from instruments.tensor_dump.reader import DumpReader
from instruments.training_watch.model_watch import watch_model
from instruments.training_watch.step_log import WatchConfig, read_step_log
from instruments.training_watch.verdict import check_loss_scale


def train(watch, model, *, steps=1, lossy=functional.cross_entropy):
    for step in range(steps):
        model.zero_grad(set_to_none=True)
        x, y = batch(step)
        loss = lossy(model(x), y)
        loss.backward()
        report = watch.step(loss)
    return report


def test_a_healthy_training_is_left_in_peace(tmp_path, caplog):
    model = Net()
    with watch_model(model, log=tmp_path / "log.jsonl") as watch:
        report = train(watch, model, steps=3)
    expected = {
        name: math.hypot(*(p.grad.norm().item() for p in getattr(model, name).parameters()))
        for name in ("first", "norm", "middle", "head")
    }
    assert list(report.layers) == list(expected)
    assert report.layers == pytest.approx(expected, rel=1e-6)
    assert report.gradient_norm == pytest.approx(math.hypot(*expected.values()), rel=1e-6)
    assert report.anomalies == ()
    assert caplog.records == []
    lines = read_step_log(tmp_path / "log.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert lines[2]["loss"] == pytest.approx(report.loss)
    assert ["layers" in line for line in lines] == [True, False, False]


def test_nothing_stays_and_nothing_changes():
    model, twin = Net(), Net()
    x, y = batch()
    with watch_model(model) as watch:
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        watch.step(loss)
        watch.step(loss)
    plain = functional.cross_entropy(twin(x), y)
    plain.backward()
    assert torch.equal(loss, plain)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    assert not any(module._forward_hooks for module in model.modules())
    assert watch.measurement.peaks == {}


@pytest.mark.parametrize(
    ("fault", "kind", "where", "words"),
    [
        ("nan weight", "not_finite", "middle", "NaN first in the output of middle (float32); finite until norm"),
        (
            "inf input",
            "not_finite",
            "first",
            "NaN first in the output of first (float32); it ran first: look at the model's input, too",
        ),
        ("vanishing", "vanishing", None, "the gradient vanishes: its norm is"),
        ("gradient", "not_finite", "middle", "that of middle, of 3 layers, while all outputs of the model are finite"),
    ],
)
def test_planted_faults_are_named(fault, kind, where, words, caplog):
    model = Net()
    x, y = batch()
    factor = 1e-9 if fault == "vanishing" else 1.0
    if fault == "nan weight":
        model.middle.weight.data[2, 3] = math.nan
    elif fault == "inf input":
        x[1] = torch.tensor([math.inf, -math.inf, 0, 0, 0, 0])
    elif fault == "gradient":
        model.middle.register_full_backward_hook(lambda _m, grads, _o: (grads[0] * math.inf,))
        model.middle.weight.register_hook(lambda grad: grad * math.inf)
    with watch_model(model) as watch:
        loss = functional.cross_entropy(model(x), y) * factor
        loss.backward()
        anomaly = watch.step(None if fault == "inf input" else loss).anomalies[0]
    assert anomaly.kind == kind
    assert anomaly.where[:1] == ((where,) if where else ())
    assert words in anomaly.message
    assert caplog.messages[0] == f"step 0: {anomaly.message}"


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
    assert [(found.line, found.code) for found in static_check(tmp_path / "train.py").findings] == [
        (5, "LP108"),
        (6, "LP102"),
        (6, "LP108"),
        (6, "LP105"),
        (7, "LP302"),
    ]
    model = Net()
    model.head.weight.data *= 50  # logits near 20: they fit well into float16, their exponentials do not
    x, y = batch()
    space = {"model": model, "x": x, "y": y}
    with watch_model(model) as watch:
        exec(compile(code, "train.py", "exec"), space)
        (anomaly, *_rest) = watch.step(space["loss"]).anomalies
    assert (anomaly.kind, anomaly.severity, anomaly.where[0]) == ("not_finite", "severe", "head")
    assert anomaly.message.startswith("the loss is inf, while all outputs of the model are finite (largest ")
    assert "in head, float16; last head, float16): compute it in float32, inside autocast" in anomaly.message
    assert "backwards, the first layer whose gradient is not finite is head" in anomaly.message


def test_values_next_to_the_end_of_float16_are_told():
    model = Net()
    model.head.bias.data[1] = 40_000.0
    with watch_model(model) as watch, torch.autocast("cpu", torch.float16):
        loss = functional.cross_entropy(model(batch()[0]), batch()[1])
    loss.backward()
    (anomaly,) = watch.step(loss).anomalies
    assert (anomaly.kind, anomaly.where) == ("near_limit", ("head",))
    assert "61% of the largest number of their format: head" in anomaly.message


@pytest.mark.parametrize("how", ["explicit unscale", "within step", "fused"])
def test_with_a_scaler_gradients_are_seen_unscaled(how):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=how == "fused")
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    x, y = batch()
    with watch_model(model, optimizer, scaler) as watch:
        with torch.autocast("cpu", torch.float16):
            loss = functional.cross_entropy(model(x), y)
        watch.note_loss(loss)
        scaler.scale(loss).backward()
        if how == "explicit unscale":
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        scaler.step(optimizer)
        scaler.update()
    assert watch.last.loss == pytest.approx(loss.item())
    assert watch.last.loss_scale == 4096.0
    assert watch.next_step == 1
    twin = Net()
    functional.cross_entropy(twin(x), y).backward()
    assert watch.last.gradient_norm == pytest.approx(
        nn.utils.get_total_norm([p.grad for p in twin.parameters()]).item(), rel=0.01
    )
    assert watch.last.anomalies == ()
    assert "unscale_" not in vars(scaler)


def test_a_scaler_in_search_of_its_scale_is_no_fault_but_one_that_finds_none_is():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**9)
    kinds = []
    with watch_model(model, optimizer, scaler) as watch:
        for _ in range(10):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = functional.cross_entropy(model(batch()[0]), batch()[1])
            scaler.scale(loss).backward()
            model.head.weight.grad[0, 0] = math.inf
            scaler.step(optimizer)
            scaler.update()
            kinds.append({(anomaly.kind, anomaly.severity) for anomaly in watch.last.anomalies})
    assert (watch.last.scale_rises, watch.last.scale_falls) == (0, 9)
    assert kinds[0] == {("skipped", "note")}
    assert kinds[3] == {("skipped", "note"), ("loss_scale", "warning")}  # loss scale 64
    assert ("falling_scale", "warning") in kinds[5]
    assert ("loss_scale", "severe") in kinds[9]  # loss scale 1


def test_check_loss_scale_alone():
    assert check_loss_scale(65536.0) == []
    assert check_loss_scale(128.0) == []
    assert [found.severity for found in check_loss_scale(127.0)] == ["warning"]
    assert [found.severity for found in check_loss_scale(1.0)] == ["severe"]
    assert [found.severity for found in check_loss_scale(math.nan)] == ["severe"]
    assert check_loss_scale(2048.0, [2.0**power for power in (15, 14, 13, 12)]) == []
    (falling,) = check_loss_scale(2048.0, [2.0**power for power in (16, 15, 14, 13, 12)])
    assert falling.message == "the loss scale fell 5 steps in a row, to 2048: something overflows at every scale"
    assert check_loss_scale(2048.0, [2.0**power for power in (16, 15, 14, 14, 13, 12)]) == []
    assert check_loss_scale(torch.amp.GradScaler("cpu", init_scale=64.0, enabled=False)) == []
    (low,) = check_loss_scale(torch.amp.GradScaler("cpu", init_scale=64.0))
    assert low.kind == "loss_scale"


def test_frozen_unused_tied_and_sparse_parameters():
    model = Net()
    model.first.requires_grad_(False)
    model.unused = nn.Linear(2, 3)
    model.sparse = nn.Embedding(9, D, sparse=True)
    model.again = model.middle
    ids = torch.tensor([1, 4, 4, 2, 0, 8, 1])
    with watch_model(model) as watch:
        loss = functional.cross_entropy(model(model.sparse(ids)), batch()[1])
        loss.backward()
        report = watch.step(loss)
    assert set(report.layers) == {"sparse", "norm", "middle", "head"}
    assert report.layers["sparse"] == pytest.approx(model.sparse.weight.grad.to_dense().norm().item(), rel=1e-6)
    middle = math.hypot(*(parameter.grad.norm().item() for parameter in model.middle.parameters()))
    assert report.layers["middle"] == pytest.approx(middle, rel=1e-6)
    assert report.anomalies == ()


def test_gradients_add_up_over_micro_batches_and_held_out_text_is_not_looked_at():
    model = Net()
    with watch_model(model) as watch:
        for step in range(3):
            functional.cross_entropy(model(batch(step)[0]), batch(step)[1]).backward()
        with torch.no_grad():
            model(torch.full((T, D), math.nan))
        report = watch.step()
    total = nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    assert report.gradient_norm == pytest.approx(total, rel=1e-6)
    assert report.loss is None
    assert report.anomalies == ()


def test_a_norm_that_overflows_is_not_taken_for_lost_gradients():
    model = Net()
    with watch_model(model) as watch:
        (functional.cross_entropy(model(batch()[0]), batch()[1]) * 1e25).backward()
        report = watch.step()
    assert {anomaly.kind for anomaly in report.anomalies} == {"exploding"}


def test_16_bit_gradients_are_measured_in_float32():
    model = Net().to(torch.bfloat16)
    with watch_model(model, config=WatchConfig(exploding=1e9)) as watch:
        loss = functional.cross_entropy(model(batch()[0].bfloat16()).float(), batch()[1])
        (loss * 1e-3).backward()
        report = watch.step(loss)
    squares = sum(p.grad.double().square().sum() for p in model.parameters())
    assert report.gradient_norm == pytest.approx(math.sqrt(squares), rel=1e-5)


def test_a_model_without_anything_to_train_is_told(caplog):
    model = Net().requires_grad_(False)
    with watch_model(model) as watch:
        model(batch()[0])
        report = watch.step(1.5)
    assert caplog.messages == ["no parameter requires a gradient: only outputs and the loss are watched"]
    assert (report.loss, report.gradient_norm, report.layers, report.anomalies) == (1.5, 0.0, {}, ())


def test_what_lasts_is_said_again_now_and_then(caplog):
    model = Net()
    with watch_model(model, config=WatchConfig(vanishing=1e6, exploding=1e9, repeat_steps=3)) as watch:
        train(watch, model, steps=7)
    assert [message.split(":")[0] for message in caplog.messages] == ["step 0", "step 3", "step 6"]


def test_notes_are_logged_as_information(caplog):
    caplog.set_level(logging.INFO, logger="instruments.training_watch")
    model = Net()
    scaler = torch.amp.GradScaler("cpu")
    with watch_model(model, scaler=scaler) as watch:
        scaler.scale(functional.cross_entropy(model(batch()[0]), batch()[1])).backward()
        model.head.weight.grad[0] = math.inf
        watch.step()
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_the_log_holds_what_json_cannot(tmp_path):
    model = Net()
    model.head.weight.data[0] = math.nan
    with watch_model(model, log=tmp_path / "a/log.jsonl", first_step=41) as watch:
        train(watch, model)
    (line,) = [
        json.loads(text, parse_constant=pytest.fail) for text in (tmp_path / "a/log.jsonl").read_text().splitlines()
    ]
    assert (line["step"], line["loss"], line["largest_output"]["module"]) == (41, "nan", "head")
    assert line["anomalies"][0]["where"][0] == "head"


def test_the_last_steps_before_the_fault_are_dumped(tmp_path):
    model = Net()
    with watch_model(model, dump=tmp_path / "dump", dump_steps=2) as watch:
        train(watch, model, steps=3)
        model.head.weight.data[0] = math.nan
        train(watch, model)
    with DumpReader(tmp_path / "dump") as reader:
        assert {record.source.step for record in reader.records} == {2, 3}


def test_wrong_use_is_explained():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watch_model(model, optimizer) as watch:
        with pytest.raises(ConfigError, match="would look at its gradients twice"):
            watch.step()
        with pytest.raises(ConfigError, match=r"a loss of shape \(2,\) is no single number"):
            watch.note_loss(torch.zeros(2))
