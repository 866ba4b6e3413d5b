"""WatchCallback in transformers' Trainer."""

from types import SimpleNamespace

import pytest
import torch
from torch.amp.grad_scaler import GradScaler
from unit.instruments.training_watch.watched_net import Net, hooks_of, loss_of

from instruments.training_watch.step_log import read_step_log
from tiny_onn import WatchCallback


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
