"""A chain with a layer that stays dense: no stage cuts, fits or counts it; and the layers that auto keeps."""

import json

import torch
from integration.carving import published, words_of_pico
from omegaconf import OmegaConf
from pico import edited_tensors, write_pico
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from zoo.checkpoints import write_checkpoint

from pipeline.artifacts import Manifest
from pipeline.cli import run_command
from stages.artifacts.carve import NeuronStatistics, Partition, Routers
from stages.artifacts.tensor_file import layer_file


def test_a_layer_that_stays_dense_is_only_copied(carves):
    """36 of the 40 neurons of layer 0 are kept; layer 1 stays dense."""
    carve = carves["dense-layer"]
    assert Partition.load(carve.stage("cluster")).carved_layers == [0]
    extracted = carve.stage("extract")
    assert [*extracted.glob("*.safetensors")] == [layer_file(extracted, 0)]
    dense = load_file(carve.dense / "model.safetensors")
    for stage, checkpoint in carve.checkpoints.items():
        rows_LED = Routers.load(carve.stage(stage)).rows
        assert rows_LED[0].any()
        assert not rows_LED[1].any()
        card = (checkpoint / "README.md").read_text()
        assert "| neurons left out | 4 in all layers together |" in card
        written = load_file(checkpoint / "model.safetensors")
        ffn = [name for name in dense if ".layers.1.mlp." in name]
        assert len(ffn) == 3
        assert all(torch.equal(written[name], dense[name]) for name in ffn)
        assert {name for name in written if ".layers.1.mlp." in name} == {*ffn}


def test_tables_leave_it_out(carves):
    carve = carves["dense-layer"]
    tables = {name: Manifest.read(carve.stage(name), remedy="").table for name in ("cluster", "assemble", "project")}
    assert [[row[0] for row in table.rows] for table in tables.values()] == [[0]] * 3
    assert any("of 1 layers" in note for note in tables["project"].notes)


def test_auto_keeps_the_layers_that_cost_most(text, tmp_path, capsys):
    source = write_pico(tmp_path / "llama", "llama", layers=4, tokenizer=True)
    with edited_tensors(source) as weights:
        for layer, size in enumerate((0.1, 0.1, 8.0, 0.1)):
            weights[f"model.layers.{layer}.mlp.down_proj.weight"] *= size
    words = [*words_of_pico(source, text), f"output_dir={tmp_path}/outputs", "stage=extract", "cluster.map=none"]
    words += ["n=8", "assemble.target=tiny_onn", "dense_layers=auto"]
    assert run_command([*words, "plan=true"]) == 0
    assert "extract" not in capsys.readouterr().out  # its shape is not known yet
    assert run_command(words) == 0
    latest = tmp_path / "outputs" / "latest"
    assert list(OmegaConf.load(latest / "config.yaml").dense_layers) == [2]
    assert Partition.load(published(tmp_path / "outputs", "cluster", "llama")).carved_layers == [0, 1, 3]
    runs = [*latest.resolve().parent.iterdir()]
    assert run_command([*words, "fresh=true"]) == 0  # measures nothing again
    assert len([*latest.resolve().parent.iterdir()]) == len(runs) + 1


def test_layers_without_an_ffn_stay_as_they_are(text, tmp_path, capsys):
    """Of Nemotron-H, each layer is Mamba, attention or an FFN; tensors and settings have the names of its own files."""
    source = write_checkpoint("nemotron_h_dense", tmp_path / "nemotron")
    weights = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    assert config.pop("layers_block_type") == ["linear_attention", "mlp", "full_attention", "mlp"]
    config |= {"hybrid_override_pattern": "M-*-", "num_hidden_layers": 4}
    (source / "config.json").write_text(json.dumps(config))
    words = [*words_of_pico(source, text), f"output_dir={tmp_path}/outputs", "cluster.map=none", "scan=parameters"]
    assert run_command([*words, "project.gradient_tokens=400", "evaluate.samples=1"]) == 0
    assert "no FFN      in 2 of 4 layers" in capsys.readouterr().out
    statistics = NeuronStatistics.load(published(tmp_path / "outputs", "scan", "nemotron"))
    assert [bool(rows.any()) for rows in statistics.sum_abs] == [False, True, False, True]
    assert Partition.load(published(tmp_path / "outputs", "cluster", "nemotron")).carved_layers == [1, 3]
    checkpoint = tmp_path / "outputs/latest/checkpoint"
    carve = AutoModelForCausalLM.from_pretrained(checkpoint)
    kept = {name: tensor for name, tensor in carve.state_dict().items() if ".layers.0." in name or ".layers.2." in name}
    assert kept
    assert all(torch.equal(tensor, weights[name.replace("model.", "backbone.")]) for name, tensor in kept.items())
