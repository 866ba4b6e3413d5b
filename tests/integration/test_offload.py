"""A model larger than its device: what does not fit is read from disk, and nothing that is found changes."""

import pytest
import torch
from integration.carving import words_of_pico
from safetensors.torch import load_file

from models.loading import load_dense
from models.pico import write_pico
from pipeline.cli import run_command


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "source"
    return write_pico(folder, "qwen3", layers=3, tie=True, tokenizer=True, max_shard_size="100KB")


def scanned(source, text, outputs, *words):
    assert run_command([*words_of_pico(source, text), "stage=scan", f"output_dir={outputs}", *words]) == 0
    (found,) = outputs.glob("artifacts/*/scan/*/statistics.safetensors")
    return load_file(found)


@pytest.fixture(scope="module")
def whole(source, text, tmp_path_factory):
    return scanned(source, text, tmp_path_factory.mktemp("whole"))


@pytest.fixture
def loaded(monkeypatch):
    """The models that a scan loads."""
    models = []

    def load(*arguments):
        models.append(load_dense(*arguments))
        return models[-1]

    monkeypatch.setattr("stages.scan.stage.load_dense", load)
    return models


# The embedding of the tokenizer's 4096 tokens takes 393 KB, a layer 23 KB.
@pytest.mark.parametrize(("memory", "places"), [("450KB", {"cpu", "disk"}), ("1KB", {"disk"})])
def test_a_scan_with_layers_on_disk_finds_the_same(source, text, whole, tmp_path, loaded, memory, places):
    found = scanned(source, text, tmp_path, "model.device_map=auto", f"model.cpu_memory={memory}")
    (model,) = loaded
    assert set(model.hf_device_map.values()) == places
    # Without it the graph would keep all weights until the backward pass.
    assert getattr(model, "is_activation_checkpointing", None) or model.is_gradient_checkpointing
    assert found.keys() == whole.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, whole[name]), name


def test_a_forward_only_scan_with_layers_on_disk(source, text, whole, tmp_path):
    words = ("scan=forward_only", "model.device_map=sequential", "model.cpu_memory=450KB")
    found = scanned(source, text, tmp_path, *words)
    assert torch.equal(found["sum_abs"], whole["sum_abs"])
