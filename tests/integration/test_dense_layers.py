"""A chain with a layer that stays dense: no stage cuts, fits or counts it."""

import torch
from safetensors.torch import load_file

from pipeline.artifacts import Manifest
from stages.artifacts.carve import Partition, Routers
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
