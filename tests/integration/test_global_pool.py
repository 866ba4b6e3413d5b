"""topology=global_pool through the whole chain: one pool for all layers, reopened by transformers alone."""

import json
from pathlib import Path

import pytest
import torch
from integration.carving import Carve, reopen, words_of_pico
from omegaconf import OmegaConf
from pico import write_pico
from safetensors.torch import load_file

from instruments.errors import INVALID
from pipeline.cli import run_command
from stages.artifacts.carve import Partition, Routers
from stages.text.config import DataConfig

L, D, F, E, N, K, S = 3, 24, 40, 7, 6, 2, 4
QUICK = (
    *("data.tokens=1200", "vocabulary.tokens=0", "cluster.map=none", "evaluate.speed_tokens=0", "evaluate.samples=0"),
    *("topology=global_pool", f"experts={E}", f"n={N}", f"top_k={K}", f"always_on={S}"),
)
GRADIENTS = ("project=gradient", "project.validate=false", "project.gradient_tokens=400")


@pytest.fixture(scope="module")
def words(text, tmp_path_factory):
    """The command for a pico model."""
    folder = tmp_path_factory.mktemp("pool")
    source = write_pico(folder / "pico", "qwen3", layers=L, hidden=D, intermediate=F, tokenizer=True)
    return [*words_of_pico(source, text), *QUICK, f"output_dir={folder / 'outputs'}"]


@pytest.fixture(scope="module")
def carve(words):
    assert run_command([*words, *GRADIENTS]) == 0
    return last_carve(words)


def last_carve(words):
    latest = Path(words[-1].partition("=")[2]) / "latest"
    data = DataConfig(**OmegaConf.to_container(OmegaConf.load(latest / "config.yaml").data))
    return Carve(Path(words[1].partition("=")[2]), (latest / "checkpoint").resolve().parent, data)


def test_experts_are_the_neurons_of_highest_score_cut_from_their_layers(carve):
    partition = Partition.load(carve.stage("cluster"))
    assert partition.sizes == (L, E, N, S, F)
    assert min(partition.given) >= 1
    dense = load_file(carve.dense / "model.safetensors")
    moe = load_file(carve.checkpoints["assemble"] / "model.safetensors")
    gate_up, down = moe["experts.gate_up_proj"], moe["experts.down_proj"]
    assert (gate_up.shape, down.shape) == ((E, 16, D), (E, D, 8))
    for expert, (neurons_N, layer) in enumerate(zip(partition.neurons.long(), partition.home.tolist(), strict=True)):
        ffn = {part: dense[f"model.layers.{layer}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down")}
        assert torch.equal(gate_up[expert, :N], ffn["gate"][neurons_N])
        assert torch.equal(gate_up[expert, 8 : 8 + N], ffn["up"][neurons_N])
        # One factor per expert, fitted to the gates.
        columns, slices = down[expert, :, :N], ffn["down"][:, neurons_N]
        scale = (columns * slices).sum() / slices.square().sum()
        assert 0.05 < scale < 2
        torch.testing.assert_close(columns, slices * scale)
    for layer, always_S in enumerate(partition.always_on.long()):
        shared = moe[f"model.layers.{layer}.mlp.shared_experts.up_proj.weight"]
        assert torch.equal(shared[:S], dense[f"model.layers.{layer}.mlp.up_proj.weight"][always_S])
    assert {name for name in dense if ".mlp." not in name} <= moe.keys()


def test_projection_moves_the_pool_and_the_routers_follow(carve):
    before, after = (load_file(carve.checkpoints[stage] / "model.safetensors") for stage in ("assemble", "project"))
    for name in ("experts.gate_up_proj", "experts.down_proj"):
        assert not torch.equal(before[name], after[name])
    routers = Routers.load(carve.stage("project"))
    assert routers.rows.shape == (L, E, D)
    for layer in range(L):
        gate = f"model.layers.{layer}.mlp.gate.weight"
        assert torch.equal(after[gate], routers.rows[layer])
        assert not torch.equal(before[gate], after[gate])


@pytest.fixture(scope="module")
def reopened(carve, tmp_path_factory):
    return reopen({"pool": carve}, tmp_path_factory.mktemp("reopened"), remote=True)["pool"]


def test_checkpoints_load_speak_and_learn(carve, reopened):
    for stage in ("assemble", "project"):
        found = reopened[stage]
        assert (found["loading"], found["warnings"], found["generated"]) == ({}, [], 5)
        assert len(found["router_gradients"]) == L
        assert found["losses"][1] < found["losses"][0]
    card = (carve.checkpoints["project"] / "README.md").read_text()
    assert f"{E} of {N} neurons in all, one pool shared by {L} layers" in card
    assert "alignment ridge, penalty " in card
    assert "; gradient projection in " in card


def test_the_evaluation_measures_what_transformers_measures(carve, reopened):
    record = json.loads((carve.evaluation / "evaluation.json").read_text())
    models = record["models"]
    assert models.keys() == {"dense", "carved", "unaligned"}
    for name, stage in (("dense", "dense"), ("carved", "project"), ("unaligned", "assemble")):
        assert models[name]["loss"] == pytest.approx(reopened[stage]["loss"], abs=1e-5)
    experts, always_on = E * 3 * 8 * D, L * 3 * 8 * D
    rest = models["dense"]["parameters"] - L * 3 * F * D
    routers = L * E * D
    assert models["carved"]["parameters"] == rest + experts + always_on + routers
    embedding = json.loads((carve.checkpoints["project"] / "config.json").read_text())["dense"]["vocab_size"] * D
    assert models["carved"]["active_parameters"] == rest - embedding + L * K * 3 * 8 * D + always_on + routers
    assert record["shape"]["topology"] == "global_pool"
    assert all(layer["agreement"] is None and layer["error"] > 0 for layer in record["layers"])
    assert (Path(carve.evaluation).parents[3] / "latest" / "report.html").exists()


def test_fewer_experts_than_layers(words, capsys):
    """One expert for three layers: two layers contribute none."""
    kept = [word for word in words if not word.startswith("project.")]
    few = ["experts=1", "top_k=1", "always_on=0", "project=none"]
    assert run_command([*kept, *few, "stage=project"]) == 0
    found = last_carve(words)
    partition = Partition.load(found.stage("cluster"))
    assert sorted(partition.given) == [0, 0, 1]
    moe = load_file(found.checkpoints["project"] / "model.safetensors")
    assert moe["experts.down_proj"].shape == (1, D, 8)
    assert not any("shared" in name for name in moe)
    assert "experts that the layers give to the pool, by score" in capsys.readouterr().out


def test_a_pool_is_trained_like_any_checkpoint(words, carve):
    quick = ("train.tokens=1000", "train.batch=4", "train.micro_batch=2", "train.tensorboard=false")
    assert run_command([*words, *GRADIENTS, *quick, "train.heldout_sequences=3", "stage=train"]) == 0
    trained = last_carve(words).folder / "checkpoint"
    before, after = (load_file(path / "model.safetensors") for path in (carve.checkpoints["project"], trained))
    assert before.keys() == after.keys()
    assert not torch.equal(before["experts.down_proj"], after["experts.down_proj"])
    assert Routers.load(trained.parent).rows.shape == (L, E, D)


def test_a_target_without_pools_is_refused(words, capsys):
    assert run_command([*words, "assemble.target=qwen3_moe", "always_on=0"]) == INVALID
    assert "no pool that all layers share" in capsys.readouterr().err
