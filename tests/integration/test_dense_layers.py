"""A chain with a layer that stays dense: no stage cuts, fits or counts it."""

import json

import pytest
import torch
from integration.carving import reopen
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


# Gates in parity mode differ from constant ones by the spread of the logits, 1e-3, but not in their sum.
PARITY = 5e-4

NAMES = ("embedded", "qwen2-chain")


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def reopened(carves, tmp_path_factory):
    return reopen({name: carves[name] for name in (*NAMES, "qwen2-parity")}, tmp_path_factory.mktemp("reopened"))


def read_losses(carve):
    models = json.loads((carve.evaluation / "evaluation.json").read_text())["models"]
    return {name: model["loss"] for name, model in models.items()}


def test_losses_are_those_of_transformers_in_a_fresh_process(carves, reopened, name):
    losses = read_losses(carves[name])
    assert losses["dense"] == pytest.approx(reopened[name]["dense"]["loss"], abs=1e-5)
    assert losses["carved"] == pytest.approx(reopened[name]["project"]["loss"], abs=1e-5)


def test_the_carve_before_projection_is_the_assembled_checkpoint(carves, reopened):
    """One is computed neuron by neuron, the other by transformers' experts."""
    losses = read_losses(carves["qwen2-parity"])
    assert losses["unaligned"] == pytest.approx(reopened["qwen2-parity"]["assemble"]["loss"], abs=PARITY)


def test_the_carve_beats_a_mask_and_a_random_router_of_its_width(carves):
    """The embedded model with half of the FFN active, on held-out text."""
    models = json.loads((carves["embedded"].evaluation / "evaluation.json").read_text())["models"]
    gaps = {name: model["gap"] for name, model in models.items()}
    assert 0 < gaps["carved"] < gaps["static_mask"]
    assert gaps["carved"] < gaps["random_router"]
