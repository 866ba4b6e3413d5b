"""A model larger than its device: weights that do not fit are read from disk, and results stay the same."""

import json

import pytest
import torch
from integration.carving import words_of_pico
from pico import write_pico
from safetensors.torch import load_file

from models.loading import is_offloaded, load_dense
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
    """The dense models that stages load."""
    models = []

    def load(*arguments):
        models.append(load_dense(*arguments))
        return models[-1]

    for module in ("scan.stage", "project.gradient_projection", "evaluate.stage"):
        monkeypatch.setattr(f"stages.{module}.load_dense", load)
    return models


def is_recomputing(model):
    renamed = hasattr(model, "is_activation_checkpointing")  # within transformers 5
    return model.is_activation_checkpointing if renamed else model.is_gradient_checkpointing


@pytest.mark.parametrize(
    ("words", "places"),
    [
        pytest.param(["model.device_map=auto", "model.cpu_memory=1KB"], {"disk"}, id="all layers on disk"),
        pytest.param(["scan.gradient_checkpointing=true"], set(), id="recomputed layers"),
    ],
)
def test_a_scan_that_saves_memory_finds_the_same(source, text, whole, tmp_path, loaded, words, places):
    found = scanned(source, text, tmp_path, *words)
    (model,) = loaded
    assert {*getattr(model, "hf_device_map", {}).values()} == places
    # Otherwise autograd would keep all weights until the backward pass.
    assert is_recomputing(model)
    assert found.keys() == whole.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, whole[name]), name


def evaluate(source, text, outputs, *words):
    """The evaluation record of the whole chain, without speed."""
    sparse = ["stage=all", "experts=4", "n=8", "top_k=2", "always_on=8", "cluster.map=none", "evaluate.speed_tokens=0"]
    sparse += ["evaluate.baselines=[unaligned]", "project.penalties=[0.1]"]
    assert run_command([*words_of_pico(source, text), *sparse, f"output_dir={outputs}", *words]) == 0
    (found,) = outputs.glob("artifacts/*/evaluate/*/evaluation.json")
    return json.loads(found.read_text())


def test_the_whole_chain_with_layers_on_disk_finds_the_same(source, text, tmp_path, loaded):
    # The embedding of the tokenizer's 4096 tokens takes 393 KB, a layer 23 KB.
    words = ["model.device_map=auto", "model.cpu_memory=450KB"]
    found = evaluate(source, text, tmp_path / "disk", *words)
    assert [is_offloaded(model) for model in loaded] == [True, True, True]
    assert {*loaded[0].hf_device_map.values()} == {"cpu", "disk"}
    assert [is_recomputing(model) for model in loaded] == [True, True, False]  # evaluate needs no gradients
    assert not list(tmp_path.rglob("offloaded"))
    whole = evaluate(source, text, tmp_path / "whole")
    assert len(whole["samples"]) > 0
    assert found == whole | {"samples": []}  # weights would be read again for every token
