"""The log of a watched training: its lines, and python -m pipeline watch_log as text and picture."""

import json
import logging
import math
from types import SimpleNamespace

import pytest
import torch
from unit.instruments.training_watch.watched_net import Net, hooks_of, loss_of, train

from instruments.errors import ConfigError
from instruments.training_watch.step_log import Anomaly, StepReport, main, read_step_log
from tiny_onn import watch_model


@pytest.fixture
def log(tmp_path):
    path, lost = tmp_path / "log.jsonl", (Anomaly("not_finite", "severe", "NaN first in head", ("head",)),)
    reports = [StepReport(step, 5.0 - step, 1.0, 2.0**step, {}, ()) for step in range(4)]
    reports += [StepReport(step, math.nan, math.inf, 2.0**step, {}, lost) for step in (4, 5)]
    lines = [json.dumps(report.record(layers=False)) for report in reports]
    path.write_text("\n".join([*lines, '{"step": 6, "los']))
    return path


def test_a_resumed_run_goes_on_behind_the_last_whole_line(log):
    model = Net()
    with watch_model(model, torch.optim.SGD(model.parameters(), 0.05), log=log, first_step=6) as watch:
        train(model, 2, optimizer=watch.optimizers[0])
    assert [line["step"] for line in read_step_log(log)] == [*range(8)]


def test_another_file_that_is_named_as_log_keeps_its_content(tmp_path):
    (tmp_path / "notes.txt").write_text("one line without an end")
    model = Net()
    with watch_model(model, torch.optim.SGD(model.parameters(), 0.05), log=tmp_path / "notes.txt") as watch:
        train(model, 1, optimizer=watch.optimizers[0])
    assert (tmp_path / "notes.txt").read_text().startswith("one line without an end")


def test_summary_and_pictures(log, tmp_path, capsys):
    assert main([str(log), "--plot", str(tmp_path / "a.png")]) == 0
    assert capsys.readouterr().out == (
        f"6 steps, 0 to 5; 2 findings\nnot_finite (2 times), first at step 4: NaN first in head\n"
        f"loss scale: 5 rises, 0 falls\n{tmp_path}/a.png\n"
    )
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_metrics_of_stage_train_can_be_read(tmp_path, capsys):
    lines = [
        {"step": 0, "heldout_loss": 3.0},
        {"step": 2, "loss": 2.0, "gradient_norm": 0.5},
        {"step": 3, "warnings": ["x"]},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main([str(tmp_path / "metrics.jsonl"), "--plot", str(tmp_path / "a.png")]) == 0
    assert "warning (1 times), first at step 3: x" in capsys.readouterr().out


def test_files_that_are_no_log(tmp_path, capsys):
    (tmp_path / "other.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "text").write_text("words\n")
    (tmp_path / "list").write_text("[]\n")
    (tmp_path / "no_step").write_text('{"loss": 1.0}\n')
    for name in ("text", "list", "no_step", "nowhere", "other.jsonl"):
        assert main([str(tmp_path / name)]) == 1
    assert main([str(tmp_path / "text"), "--plot", str(tmp_path / "no/a.png")]) == 2
    assert "holds neither losses nor gradient norms" in capsys.readouterr().err


def test_findings_are_logged_by_severity(caplog):
    caplog.set_level(logging.INFO, logger="instruments.training_watch")
    model = Net()
    model.head.weight.register_hook(lambda grad: grad * math.inf)
    scaler = torch.amp.GradScaler("cpu")
    with watch_model(model, scaler=scaler) as watch:
        scaler.scale(loss_of(model)).backward()
        watch.step()
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_a_log_of_other_tools():
    """It gets single numbers; findings are counted by kind."""
    rows = {}
    tensorboard = SimpleNamespace(add_scalar=lambda name, value, step: rows.update({(name, step): value}))
    wandb = SimpleNamespace(
        log=lambda data: rows.update({(name, data["watch/step"]): one for name, one in data.items()})
    )
    for first, sink in ((9, tensorboard), (99, wandb)):
        model = Net()
        with watch_model(model, torch.optim.SGD(model.parameters(), 0.05), log=sink, first_step=first) as watch:
            train(model, 2, optimizer=watch.optimizers[0])
            model.head.weight.data[0] = math.nan
            train(model, 1, optimizer=watch.optimizers[0])
        assert rows["watch/gradient_norm", first] > 0
        assert math.isnan(rows["watch/loss", first + 2])
        found = [("watch/findings/not_finite", first + step) in rows for step in range(3)]
        assert found == [False, False, True]


def test_a_full_disk_ends_the_log_and_not_the_training(caplog):
    model = Net()
    with watch_model(model, torch.optim.SGD(model.parameters(), 0.05), log="/dev/full") as watch:
        train(model, 3, optimizer=watch.optimizers[0])
    assert watch.next_step == 3
    assert caplog.messages == ["the log ends before step 0: [Errno 28] No space left on device"]


def test_a_log_is_continued_after_the_script_has_left_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = Net()
    with watch_model(model, torch.optim.SGD(model.parameters(), 0.05), log="logs/watch.jsonl") as watch:
        monkeypatch.chdir("/")
        train(model, 2, optimizer=watch.optimizers[0])
    assert [line["step"] for line in read_step_log(tmp_path / "logs/watch.jsonl")] == [0, 1]


@pytest.mark.parametrize("sink", [object(), logging.getLogger()])
def test_a_log_of_no_known_kind_is_refused_before_any_hook(sink):
    model = Net()
    with pytest.raises(ConfigError):
        watch_model(model, log=sink)
    assert hooks_of(model) == []


def test_the_log_is_strict_json(tmp_path):
    model = Net()
    model.head.weight.data[0] = math.nan
    with watch_model(model, log=tmp_path / "a/log.jsonl", first_step=41) as watch:
        loss = loss_of(model)
        loss.backward()
        watch.step(loss=loss)
    (line,) = [
        json.loads(text, parse_constant=pytest.fail) for text in (tmp_path / "a/log.jsonl").read_text().splitlines()
    ]
    assert (line["step"], line["loss"]) == (41, "nan")
    assert line["anomalies"][0]["where"][0] == "head"
