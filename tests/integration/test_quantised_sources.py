"""Checkpoints that bitsandbytes stored in 4 or 8 bits, carved like any other."""

import json

import pytest
import torch
from integration.carving import published, words_of_pico
from numerics.quantised_models import decoded_weights, plain_twin, store_quantised, write_plain
from pico import change_config
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from models.check import check_source
from models.config import ModelConfig
from models.stream import LayerStream
from pipeline.cli import run_command


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return write_plain(tmp_path_factory.mktemp("plain") / "plain", "qwen3", tokenizer=True)


@pytest.fixture(scope="module", params=["nf4-nested", "int8"])
def stored(request, plain, tmp_path_factory):
    """Shards so small that a weight and its scales are in different files."""
    return store_quantised(
        plain, tmp_path_factory.mktemp("stored") / request.param, request.param, max_shard_size="9KB"
    )


@pytest.fixture(scope="module")
def twin(plain, stored):
    """The stored model in plain bf16 weights, as transformers decodes them, computing in fp32."""
    twin = plain_twin(AutoModelForCausalLM.from_pretrained(stored), plain)
    for _name, weight in decoded_weights(twin):
        weight.copy_(weight.bfloat16())
    return twin


@pytest.fixture(scope="module")
def carve(stored, text, tmp_path_factory):
    """Stage → its folder, of a carve with all experts on, equal parts of the FFN."""
    outputs = tmp_path_factory.mktemp("outputs")
    words = ["stage=assemble", "experts=8", "n=9", "top_k=8", "always_on=0"]
    words += ["assemble.logit_std=0"]
    quick = ["cluster.map=none", f"output_dir={outputs}"]
    assert run_command([*words_of_pico(stored, text), *words, *quick]) == 0
    return lambda stage: published(outputs, stage, stored.name)


def test_experts_are_slices_of_the_decoded_weights_bit_for_bit(carve, twin):
    neurons = load_file(carve("cluster") / "partition.safetensors")["neurons"].unflatten(0, (2, -1))
    written = load_file(carve("assemble") / "checkpoint" / "model.safetensors")
    for layer, neurons_EN in enumerate(neurons):
        mlp = twin.model.layers[layer].mlp
        for expert, neurons_N in enumerate(neurons_EN):
            for part, axis, gate_scale in (("gate", 0, 1), ("up", 0, 1), ("down", 1, 8)):
                dense = getattr(mlp, f"{part}_proj").weight.detach().bfloat16()
                slices = written[f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"]
                assert slices.dtype == torch.bfloat16
                assert torch.equal(slices.narrow(axis, 0, 9), dense.index_select(axis, neurons_N.long()) * gate_scale)


def test_the_carved_checkpoint_is_plain_and_gives_the_same_logits(carve, twin):
    checkpoint = carve("assemble") / "checkpoint"
    config = json.loads((checkpoint / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in load_file(checkpoint / "model.safetensors").values()} == {torch.bfloat16}
    carved = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    ids = torch.arange(1, 12)[None]
    with torch.no_grad():
        assert (carved(ids).logits - twin(ids).logits).abs().max() <= 1e-5


def local(folder, **settings):
    return ModelConfig(kind="local", path=str(folder), **settings)


def test_a_config_that_says_nothing_of_quantisation(plain, tmp_path):
    folder = store_quantised(plain, tmp_path, "fp4")
    change_config(folder, quantization_config=None)
    (error,) = check_source(local(folder))
    assert error.what == "14 weights are stored in 4 or 8 bits, and config.json says nothing of it"
    assert error.where.startswith("model.layers.0.mlp.down_proj.weight, model.layers.0.mlp.gate_proj.weight, ")
    assert error.do == "copy quantization_config from the checkpoint's own config.json"


def test_shapes_are_checked_as_the_model_sees_them(plain, tmp_path):
    folder = store_quantised(plain, tmp_path, "nf4")
    change_config(folder, intermediate_size=73)
    (error,) = check_source(local(folder))
    assert error.what == "6 tensors do not have the shape that config.json says"
    assert error.where.startswith("model.layers.0.mlp.down_proj.weight is (40, 72), not (40, 73), ")


SPARSE = [
    *("stage=all", "experts=4", "n=9", "top_k=2", "always_on=18", "cluster.map=none", "project.penalties=[0.1]"),
    *("evaluate.speed_tokens=100", "evaluate.baselines=[unaligned]"),
]


def evaluate(source, text, outputs, *words):
    """The evaluation record of the whole chain."""
    assert run_command([*words_of_pico(source, text), *SPARSE, f"output_dir={outputs}", *words]) == 0
    return json.loads((published(outputs, "evaluate", source.name) / "evaluation.json").read_text())


def test_a_stored_checkpoint_goes_through_the_whole_chain(stored, plain, text, tmp_path):
    found = evaluate(stored, text, tmp_path)
    dense, carved = found["models"]["dense"], found["models"]["carved"]
    unquantised = AutoModelForCausalLM.from_pretrained(plain)
    assert dense["parameters"] == unquantised.num_parameters()
    looked_up = unquantised.get_input_embeddings().weight.numel()  # a token reads one row
    assert dense["active_parameters"] == dense["parameters"] - looked_up
    assert carved["active_parameters"] < carved["parameters"]
    assert abs(carved["gap"]) < 0.5
    assert all(0 < layer["error"] < 1 for layer in found["layers"])


def test_a_model_scanned_in_4_bits_is_held_against_its_stored_weights(plain, text, tmp_path):
    found = evaluate(plain, text, tmp_path / "nf4", "model.quantization=nf4")
    whole = evaluate(plain, text, tmp_path / "plain")
    assert found["models"]["dense"]["loss"] == whole["models"]["dense"]["loss"]
    assert found["models"]["dense"]["parameters"] == whole["models"]["dense"]["parameters"]
    assert found["models"]["carved"]["loss"] != whole["models"]["carved"]["loss"]


def test_a_stored_checkpoint_runs_layer_by_layer(stored, twin):
    ids = torch.arange(1, 12)[None]
    with LayerStream(stored, device=torch.device("cpu")) as stream, torch.no_grad():
        (passage,) = stream.embed([ids])
        for layer in stream.layers():
            x_BTD = layer.attend(passage)
            layer.add(passage, torch.arange(ids.shape[1]), layer.ffn(x_BTD[0]))
        torch.testing.assert_close(stream.head()(passage), twin(ids).logits, rtol=1e-5, atol=1e-5)
