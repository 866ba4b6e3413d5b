"""What is captured, when, and what happens when memory is short."""

import math
import threading
import time

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from unit.instruments.tensor_dump.small_model import D, F, Small, inputs, run

from instruments.errors import ConfigError
from instruments.tensor_dump import writer
from instruments.tensor_dump.config import DumpConfig, read_settings
from instruments.tensor_dump.reader import DumpReader
from instruments.tensor_dump.tensor_dump import TensorDump
from instruments.tensor_dump.writer import HostMemory, measure


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "dump"


def steps_of(folder):
    return sorted({record.source.step for record in DumpReader(folder).records})


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6]),
        ({"first_step": 2}, [2, 3, 4, 5, 6]),
        ({"first_step": 1, "every_steps": 3}, [1, 4]),
        ({"every_steps": 2, "max_steps": 2}, [0, 2]),
        ({"first_step": 9}, []),
    ],
)
def test_the_schedule(folder, settings, steps, caplog):
    dump = run(folder, DumpConfig(**settings), steps=7)
    assert (steps_of(folder), dump.manifest.never_fired) == (steps, [])
    assert ("no step was dumped" in caplog.text) == (not steps)


def test_selected_modules_tensors_and_tokens_and_free_metadata(folder):
    config = DumpConfig(modules=["layers.0"], tensors=["weight", "input"], max_tokens=2)
    run(folder, config, steps=1, metadata={"run": "a", "lr": 0.1})
    with DumpReader(folder) as reader:
        given, weight = sorted(reader.records, key=lambda record: record.source.tensor)
        assert [one.source.module for one in (given, weight)] == ["layers.0", "layers.0"]
        assert torch.equal(reader.load(given), inputs(0)[:2])
        assert weight.shape == (F, D)
    assert weight.metadata == {"run": "a", "lr": 0.1}


def test_statistics_alone(folder):
    dump = run(folder, DumpConfig(keep="statistics"), steps=1)
    listing = DumpReader(folder)
    assert {record.status for record in listing.records} == {"statistics"}
    assert list(folder.glob("*.safetensors")) == []
    (record,) = listing.select(module="layers.0", tensor="input")
    assert record.statistics.maximum == float(inputs(0).max())
    assert list(dump.manifest.complaints()) == []
    with DumpReader(folder) as reader, pytest.raises(Exception, match="has no bytes: its status is statistics"):
        reader.load(record)


class Twin(Small):
    """Two layers with one input."""

    def forward(self, x):
        return self.layers[0](x).sum() + self.layers[1](x).sum()


WIDE = {"features": 512, "hidden": 300}  # the input of 512 rows takes 1 MiB


def test_training_waits_while_the_memory_is_full(folder, monkeypatch, caplog):
    real = writer.measure  # a writer that cannot keep up
    monkeypatch.setattr(writer, "measure", lambda tensor: time.sleep(0.1) or real(tensor))
    config = DumpConfig(tensors=["input"], memory_mib=2)
    dump = run(folder, config, steps=6, model=Small(**WIDE), rows=512)
    assert dump._memory.used == 0
    assert dump._memory.most_used <= 2 * 2**20
    with DumpReader(folder) as reader:
        assert len(reader.records) == 12
        for step, record in enumerate(reader.select(module="layers.0")):
            assert torch.equal(reader.load(record), inputs(step, 512, 512))
    assert caplog.text == ""


def test_a_tensor_that_layers_share_is_counted_once(folder, monkeypatch):
    """Its memory is released once: else later captures would be written over."""
    monkeypatch.setattr(writer, "SHARD_BYTES", 1)
    model = Twin(D, D)
    dump = run(folder, DumpConfig(tensors=["input", "grad_output"]), steps=5, model=model)
    assert dump._memory.used == 0
    with DumpReader(folder) as reader:
        for layer in (0, 1):
            for step, record in enumerate(reader.select(module=f"layers.{layer}", tensor="input")):
                assert torch.equal(reader.load(record), inputs(step))


def test_a_tensor_larger_than_the_memory_is_measured(folder, caplog):
    config = DumpConfig(tensors=["input"], memory_mib=1)
    run(folder, config, steps=1, model=Small(**WIDE), rows=600)
    assert [record.status for record in DumpReader(folder).records] == ["statistics", "stored"]
    assert "of 1 tensors only statistics were kept" in caplog.text


def test_the_last_steps_are_written_when_a_loss_is_not_finite(folder):
    losses = [1.0, 2.0, 3.0, torch.tensor(math.nan), 5.0, 6.0]
    run(folder, DumpConfig(last_steps=2), steps=6, losses=losses)
    assert steps_of(folder) == [2, 3]
    with DumpReader(folder) as reader:
        for record in reader.select(module="layers.0", tensor="input"):
            assert torch.equal(reader.load(record), inputs(record.source.step))


@pytest.mark.parametrize(("error", "steps"), [(FloatingPointError, [1, 2]), (KeyboardInterrupt, [])])
def test_the_last_steps_are_written_when_the_loop_raises(folder, error, steps):
    """Such as its own check of the loss, before it calls `step`."""

    def train(model):
        with TensorDump(model, folder, DumpConfig(last_steps=2), environment={}) as dump:
            for step in range(3):
                model(inputs(step)).backward()
                if step == 2:
                    raise error
                dump.step(1.0)

    with pytest.raises(error):
        train(Small())
    assert steps_of(folder) == steps


def test_with_finite_losses_the_last_steps_are_forgotten(folder):
    dump = run(folder, DumpConfig(last_steps=2, memory_mib=1), steps=40, model=Small(**WIDE), rows=64)
    assert not DumpReader(folder).records
    assert dump._memory.most_used <= 2**20
    assert list(dump.manifest.complaints()) == []  # nothing is missing


def test_steps_that_do_not_fit_are_given_up_oldest_first(folder):
    losses = [1.0] * 5 + [math.inf]
    config = DumpConfig(last_steps=4, memory_mib=2, tensors=["input"])
    run(folder, config, steps=6, losses=losses, model=Small(**WIDE), rows=300)
    # One step takes 0.93 MiB.
    found = [(record.source.step, record.source.module, record.status) for record in DumpReader(folder).records]
    assert found == [(step, f"layers.{layer}", "stored") for step in (4, 5) for layer in (0, 1)]


def test_a_label_is_recorded_with_the_real_format(folder):
    model = Small().to(torch.bfloat16)
    with TensorDump(model, folder, environment={"CUSTOM_QUANT_TYPE": "mxfp8"}) as dump:
        model(inputs(0).to(torch.bfloat16)).backward()
        dump.step()
    assert {(record.quant_type, record.label) for record in DumpReader(folder).records} == {("bf16", "mxfp8")}


def test_modules_that_never_ran_zeros_and_nan_are_reported(folder, caplog):
    class Part(Small):
        def __init__(self):
            super().__init__()
            self.unused = nn.Linear(3, 2)

        def forward(self, x):
            return super().forward(x) * self.factor

    model = Part()
    with TensorDump(model, folder, environment={}) as dump:
        for model.factor in (1.0, 0.0):
            model(inputs(0)).backward()
            dump.step()
        with torch.no_grad():
            model(inputs(0) * math.nan)
    manifest = dump.manifest
    assert manifest.never_fired == ["unused"]
    assert manifest.missing == {}
    assert len(manifest.zero_gradients) == len(manifest.nonfinite) == 2
    assert "1 modules never fired: unused" in caplog.text
    assert "2 gradients are zero everywhere" in caplog.text
    assert "2 tensors hold values that are not finite" in caplog.text
    assert DumpReader(folder).manifests()[0].never_fired == ["unused"]
    with torch.no_grad(), TensorDump(Small(), folder.with_name("forward"), environment={}) as dump:
        dump.root(inputs(0))
    assert dump.manifest.missing == {"layers.0": ["grad_output"], "layers.1": ["grad_output"]}


def test_shared_inputs_are_measured_once(folder, monkeypatch):
    measured = []
    monkeypatch.setattr(
        "instruments.tensor_dump.recorder.measure", lambda tensor: measured.append(tensor.shape) or measure(tensor)
    )
    run(folder, DumpConfig(keep="statistics", tensors=["input"]), steps=1, model=Twin(D, D))
    assert len(measured) == 1


def test_weights_that_no_adapter_sees_are_listed(folder):
    model = Small()
    model.table = nn.Parameter(torch.zeros(3, 2, 2))
    assert run(folder, model=model, steps=1).manifest.unseen_weights == ["table"]


def test_a_folder_is_found_again_after_the_script_has_left_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = Small()
    with TensorDump(model, "dump", environment={}):
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        model(inputs(0)).backward()
    assert len(DumpReader(tmp_path / "dump").records) == 6
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_all_files_can_be_read_by_those_who_can_read_the_index(folder):
    run(folder, steps=1)
    assert {path.stat().st_mode for path in folder.iterdir()} == {(folder / "index-00000.jsonl").stat().st_mode}


def test_metadata_of_a_file_name_that_is_not_utf_8_and_of_no_json(folder):
    run(folder, steps=1, metadata={"data": "caf\udce9"})
    assert {record.metadata["data"] for record in DumpReader(folder).records} == {"caf\udce9"}
    with pytest.raises(ConfigError, match="metadata"):
        TensorDump(Small(), folder, metadata={"data": folder}, environment={})


def test_steps_of_transformers_trainer_are_counted_by_a_hook_on_optimizers(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": 31}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **sizes))
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(31, (6, 8)).unbind()]
    arguments = TrainingArguments(
        tmp_path, max_steps=3, per_device_train_batch_size=1, gradient_accumulation_steps=2, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=rows)
    config = DumpConfig(modules=["lm_head"], tensors=["input"])
    with (
        TensorDump(model, tmp_path / "dump", config, environment={}) as dump,
        register_optimizer_step_post_hook(lambda *_: dump.step()),
    ):
        trainer.train()
    found = [(record.source.step, record.source.microbatch) for record in DumpReader(tmp_path / "dump").records]
    assert found == [(step, microbatch) for step in range(3) for microbatch in range(2)]


def test_the_environment_switches_it_off_and_names_the_folder(folder):
    model = Small()
    with TensorDump(model, folder, environment={"TENSOR_SAVE_ENABLED": "0"}) as dump:
        assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
        dump.step(model(inputs(0)))
    assert run(folder, DumpConfig(ranks=[3])).enabled is False
    assert not folder.exists()
    with pytest.raises(ConfigError, match="no folder"):
        TensorDump(Small(), environment={})
    run(None, steps=1, environment={"TENSOR_SAVE_DIR": str(folder), "TENSOR_SAVE_ENABLED": "true"})
    assert len(DumpReader(folder).records) == 6


def test_one_model_is_dumped_once_at_a_time(folder, tmp_path):
    model = Small()
    with TensorDump(model, folder, environment={}):
        with pytest.raises(ConfigError, match="the model is being dumped already"):
            TensorDump(model, tmp_path / "other", environment={}).__enter__()
        model(inputs(0)).backward()
    run(tmp_path / "third", model=model, steps=1)


@pytest.mark.parametrize(
    ("settings", "environment", "setting"),
    [
        ({"modules": ["*.q_proj", "layers.0"]}, {}, "modules"),
        ({"tensors": ["query"]}, {}, "tensors"),
        ({}, {"CUSTOM_QUANT_TYPE": "fp3"}, "CUSTOM_QUANT_TYPE"),
        ({"quant_type": "int4"}, {}, "quant_type"),
        ({}, {"TENSOR_SAVE_ENABLED": "maybe"}, "TENSOR_SAVE_ENABLED"),
        ({"keep": "everything"}, {}, "keep"),
        ({"every_steps": 0}, {}, "every_steps"),
    ],
)
def test_settings_without_meaning_are_errors(tmp_path, settings, environment, setting):
    with pytest.raises(ConfigError) as error:
        TensorDump(Small(), tmp_path / "dump", DumpConfig(**settings), environment=environment)
    assert setting in error.value.where
    assert error.value.do
    assert not (tmp_path / "dump").exists()


@pytest.mark.parametrize("settings", ['{"steps": 3}', "max_steps=2", '{"max_steps": "2"}'])
def test_settings_in_the_environment(settings):
    assert read_settings({"TENSOR_SAVE_CONFIG": '{"max_steps": 2}'}) == DumpConfig(max_steps=2)
    with pytest.raises(ConfigError, match="TENSOR_SAVE_CONFIG"):
        read_settings({"TENSOR_SAVE_CONFIG": settings})


def test_waiting_ends_when_there_is_room():
    memory = HostMemory(512)
    assert memory.reserve(512)
    assert not memory.reserve(1)
    start = time.monotonic()
    threading.Timer(0.05, memory.release, [512]).start()
    assert memory.reserve(300, wait=True)
    assert time.monotonic() - start >= 0.04
    assert (memory.used, memory.most_used) == (300, 512)
