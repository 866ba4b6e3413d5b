import pytest
import torch
from pico import write_pico
from safetensors.torch import load_file

from models.config import ModelConfig
from stages.artifacts.carve import Partition
from stages.artifacts.experts import load_layer
from stages.artifacts.job import Job
from stages.artifacts.tensor_file import layer_file
from stages.extract.stage import run

LAYERS, WIDTH = 2, 40


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return write_pico(
        tmp_path_factory.mktemp("dense"), "qwen3", intermediate=WIDTH, layers=LAYERS, dtype=torch.bfloat16
    )


@pytest.fixture
def job(tmp_path):
    parents = {"cluster": tmp_path / "cluster"}
    out = tmp_path / "out"
    for folder in (*parents.values(), out):
        folder.mkdir()
    neurons = torch.stack(
        [torch.randperm(WIDTH, generator=torch.Generator().manual_seed(i)) for i in range(LAYERS)]
    ).int()
    # The other 11 neurons are dropped.
    routed, home = neurons[:, 5:29].reshape(LAYERS * 3, 8), torch.tensor([0, 0, 0, 1, 1, 1], dtype=torch.int32)
    Partition(WIDTH, routed, home, neurons[:, :5].contiguous()).save(parents["cluster"])
    return Job(parents, out, tmp_path / "scratch")


def test_experts_are_the_dense_neurons(dense, job):
    table = run(job, model=ModelConfig(kind="local", path=str(dense)))
    weights = load_file(dense / "model.safetensors")
    partition = Partition.load(job.parents["cluster"])
    for layer in range(LAYERS):
        gate, up, down = (weights[f"model.layers.{layer}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        neurons_EN = partition.neurons_of(layer).long()
        experts, stored = load_layer(job.out, layer), load_file(layer_file(job.out, layer))
        assert torch.equal(experts.gate_END, gate[neurons_EN])
        assert torch.equal(experts.up_END, up[neurons_EN])
        assert torch.equal(experts.down_EDN, down[:, neurons_EN].transpose(0, 1))
        assert torch.equal(experts.shared_gate_SD, gate[partition.always_on[layer].long()])
        assert torch.equal(experts.shared_up_SD, up[partition.always_on[layer].long()])
        assert torch.equal(experts.shared_down_DS, down[:, partition.always_on[layer].long()])
        assert torch.equal(stored["neurons"], partition.neurons_of(layer))
        assert torch.equal(stored["always_on"], partition.always_on[layer])
    assert load_layer(job.out, 1).gate_END.dtype == torch.bfloat16
    rows = {str(name): value for name, value in table.rows}
    expected = {"layers": 2, "experts a layer": 3, "neurons dropped a layer": "11 of 40", "most copies of a neuron": 1}
    assert rows.items() >= expected.items()


def test_a_pool_is_extracted_from_the_layers_that_give_to_it(dense, job):
    """Layer 0 contributes no experts but keeps its always-on neurons."""
    neurons = torch.randperm(WIDTH - 5, generator=torch.Generator().manual_seed(3))[:24].view(3, 8).int() + 5
    always_on = torch.arange(5).expand(LAYERS, 5).int()
    Partition(WIDTH, neurons, torch.ones(3, dtype=torch.int32), always_on, pooled=True).save(job.parents["cluster"])
    table = run(job, model=ModelConfig(kind="local", path=str(dense)))
    assert dict(table.rows)["experts in all"] == 3
    weights = load_file(dense / "model.safetensors")
    gate_FD, down_DF = (weights[f"model.layers.1.mlp.{part}_proj.weight"] for part in ("gate", "down"))
    experts = load_layer(job.out, 1)
    assert torch.equal(experts.gate_END, gate_FD[neurons.long()])
    assert torch.equal(experts.down_EDN, down_DF[:, neurons.long()].transpose(0, 1))
    assert len(load_layer(job.out, 0).gate_END) == 0
    assert torch.equal(load_layer(job.out, 0).shared_gate_SD, weights["model.layers.0.mlp.gate_proj.weight"][:5])
