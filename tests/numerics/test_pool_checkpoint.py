"""An emitted global pool: equal to a loop over experts, stored once, and loadable in a fresh process."""

import copy
import json
from dataclasses import fields, replace

import pytest
import torch
from numerics.tiny_onn_carves import reload
from pico import write_pico
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import models.tiny_onn.register  # noqa: F401 - from_pretrained is to know the class
from models.checkpoint.shards import DenseReader, ShardReader
from models.config import MoEShape
from models.emit import emit_checkpoint
from models.experts import ExpertLoop, ExpertWeights, slice_experts
from models.routing import GateKind, LinearRouter
from models.targets.config import MOE_TARGETS
from stages.artifacts.carve import Partition
from stages.artifacts.experts import join_pool

L, D, F, E, N, K, S = 3, 24, 40, 5, 7, 2, 3
SHAPE = MoEShape(E, N, K, S, "global_pool")
IDS = torch.arange(39).view(3, 13)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """A pool without experts from layer 1; experts are padded from 7 to 8 neurons, always-on neurons from 3 to 8."""
    folder = tmp_path_factory.mktemp("pool")
    dense = write_pico(folder / "dense", "qwen3", layers=L, hidden=D, intermediate=F)
    orders = torch.stack(
        [torch.randperm(F, generator=torch.Generator().manual_seed(layer)) for layer in range(L)]
    ).int()
    neurons = torch.stack([orders[0, 3:10], orders[0, 10:17], orders[2, 3:10], orders[2, 10:17], orders[2, 17:24]])
    partition = Partition(
        F, neurons, torch.tensor([0, 0, 2, 2, 2], dtype=torch.int32), orders[:, :S].contiguous(), pooled=True
    )
    rows_LED = torch.randn(L, E, D, generator=torch.Generator().manual_seed(8))
    with DenseReader(dense) as reader:
        parts = [
            slice_experts(reader.projections(layer), partition.neurons_of(layer), always_S)
            for layer, always_S in enumerate(partition.always_on)
        ]
    emit_checkpoint(
        dense, folder / "moe", target=MOE_TARGETS["tiny_onn"], shape=SHAPE, routers=lambda layer: rows_LED[layer],
        experts=lambda layer: parts[layer],
    )  # fmt: skip
    loops = [
        ExpertLoop(
            experts, partition.neurons, partition.always_on[layer], LinearRouter.without_bias(rows_LED[layer]), K, F,
            torch.nn.functional.silu, GateKind.SIGMOID_OF_CHOSEN,
        )
        for layer, experts in enumerate(join_pool(parts))
    ]  # fmt: skip
    return folder, loops


@pytest.fixture
def model(case):
    return AutoModelForCausalLM.from_pretrained(case[0] / "moe", dtype=torch.float32).eval()


def test_the_pool_stands_in_the_checkpoint_once(case):
    with ShardReader(case[0] / "moe") as reader:
        experts = sorted(name for name in reader.names if "experts" in name and "shared" not in name)
        assert experts == ["experts.down_proj", "experts.gate_up_proj"]
        assert reader.tensor("experts.gate_up_proj").shape == (E, 16, D)
        assert reader.tensor("experts.down_proj").shape == (E, D, 8)
        assert not reader.tensor("experts.down_proj")[:, :, N:].any()
        for layer in range(L):
            assert reader.tensor(f"model.layers.{layer}.mlp.gate.weight").shape == (E, D)
            assert reader.tensor(f"model.layers.{layer}.mlp.shared_experts.down_proj.weight").shape == (D, 8)
    config = json.loads((case[0] / "moe" / "config.json").read_text())
    assert (config["topology"], config["num_experts"], config["num_experts_per_tok"]) == ("global_pool", E, K)


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
def test_every_layer_equals_the_loop_and_so_do_the_gradients(case, model, implementation):
    """An expert's gradient is the sum over all layers that use the expert."""
    model.set_experts_implementation(implementation)
    _folder, loops = case
    draw = torch.Generator().manual_seed(3)
    inputs, wanted = torch.randn(2, L, 1, 17, D, generator=draw)
    sum((layer.mlp(x) * y).sum() for layer, x, y in zip(model.model.layers, inputs, wanted, strict=True)).backward()
    weights = {
        spec.name: getattr(loops[0].experts, spec.name).clone().requires_grad_() for spec in fields(ExpertWeights)
    }
    routed = {name: weight for name, weight in weights.items() if not name.startswith("shared")}
    rows = [loop.router.rows_ED.clone().requires_grad_() for loop in loops]
    total = 0
    for loop, rows_ED, layer, x, y in zip(loops, rows, model.model.layers, inputs, wanted, strict=True):
        trained = replace(
            loop, experts=replace(loop.experts, **routed), router=LinearRouter(rows_ED, loop.router.bias_E)
        )
        output_TD = trained(x[0])
        torch.testing.assert_close(layer.mlp(x)[0], output_TD, rtol=1e-4, atol=1e-4)
        total = total + (output_TD * y[0]).sum()
    total.backward()
    gate_EnD, up_EnD = model.experts.gate_up_proj.grad.chunk(2, dim=1)
    down_EDn = model.experts.down_proj.grad
    for found, name in ((gate_EnD[:, :N], "gate_END"), (up_EnD[:, :N], "up_END"), (down_EDn[..., :N], "down_EDN")):
        assert routed[name].grad.abs().max() > 0
        torch.testing.assert_close(found, routed[name].grad, rtol=1e-3, atol=1e-3)
    assert not gate_EnD[:, N:].any()
    for layer, rows_ED in zip(model.model.layers, rows, strict=True):
        torch.testing.assert_close(layer.mlp.gate.weight.grad, rows_ED.grad, rtol=1e-3, atol=1e-3)


def test_a_module_that_replaces_the_pool_is_used(model):
    """As adapters of PEFT and FSDP do."""

    class Half(torch.nn.Module):
        def __init__(self, experts):
            super().__init__()
            self.base_layer = experts

        def forward(self, *arguments):
            return self.base_layer(*arguments) / 2

    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.experts.down_proj /= 2
        assert not torch.equal(copied(IDS).logits, model(IDS).logits)
        model.experts = Half(model.experts)
        torch.testing.assert_close(model(IDS).logits, copied(IDS).logits)


def test_it_loads_in_a_fresh_process_and_speaks(case, model):
    """With the project imported, and with only the code in the checkpoint's folder."""
    folder, _loops = case
    with torch.no_grad():
        save_file({"ids": IDS, "logits": model(IDS).logits}, folder / "dense_logits.safetensors")
    for report in reload(folder.parent, registered=[folder.name], remote=[folder.name]).values():
        found = report[folder.name]
        assert found["difference"] < 1e-6
        assert found["again"] == 0
        assert found["decoder"] is None
        assert (found["loading"], found["warnings"]) == ({}, [])
        assert found["cached"] == found["uncached"]
