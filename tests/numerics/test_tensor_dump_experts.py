"""Experts in fused 3-D parameters: a dump holds the operands of their products and changes no result."""

from collections import defaultdict

import pytest
import torch
from numerics.tiny_onn_carves import write_carve
from pico import write_pico
from torch.overrides import _get_current_function_mode_stack
from transformers import AutoModelForCausalLM
from transformers.integrations import moe

import models.tiny_onn.register  # noqa: F401
from instruments.tensor_dump.config import DumpConfig
from instruments.tensor_dump.reader import DumpReader
from instruments.tensor_dump.tensor_dump import TensorDump
from stages.losses import enable_gradient_checkpointing

E, K, N = 5, 2, 8
SIZES = {"moe_intermediate_size": N, "num_experts": E, "num_experts_per_tok": K}
IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    return {
        "qwen3_moe": write_pico(folder / "qwen3_moe", "qwen3_moe", **SIZES),
        "mixtral": write_pico(folder / "mixtral", "mixtral", num_local_experts=E, num_experts_per_tok=K),
        "tiny_onn": write_carve(folder / "tiny_onn", "qwen3", top_k=K) / "moe",
    }


@pytest.fixture
def load(folders):
    def load(family, implementation):
        model = AutoModelForCausalLM.from_pretrained(
            folders[family], dtype=torch.float32, experts_implementation=implementation
        )
        return model.train()

    return load


def train(model):
    ids = torch.arange(14).view(2, 7)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach()


def dump(model, folder, **settings):
    config = DumpConfig(modules=["*.experts.*"], **settings)
    with TensorDump(model, folder, config, environment={}) as dumped:
        loss = train(model)
        dumped.step(loss)
    assert (dumped.manifest.never_fired, dumped.manifest.missing) == ([], {})
    return loss


def by_call(reader):
    """Tensors of a dump: {(module, call): {tensor: value}}."""
    found = defaultdict(dict)
    for record in reader.records:
        source = record.source
        assert source.tensor not in found[source.module, source.call]
        found[source.module, source.call][source.tensor] = reader.load(record)
    return found


@pytest.fixture
def spied(monkeypatch):
    """Record the operands of products with 3-D parameters in the functions of transformers that compute them."""

    def run(model):
        kept = defaultdict(list)
        names = {p.untyped_storage().data_ptr(): name for name, p in model.named_parameters() if p.ndim == 3}
        shapes = {p.shape[1:]: name.rpartition(".")[2] for name, p in model.named_parameters() if p.ndim == 3}
        layers = []

        def spy(real):
            def product(rows, weight, *args, **kwargs):
                output = real(rows, weight, *args, **kwargs)
                name = names.get(weight.untyped_storage().data_ptr())
                if name is None and weight.ndim == 3:  # gathered for batched_mm
                    name = f"{layers[-1]}.{shapes[weight.shape[1:]]}"
                if name is not None:
                    output.retain_grad()
                    kept[name].append((rows.detach().clone(), weight.detach().clone(), output))
                return output

            return product

        for place, name in ((moe, "_grouped_linear"), (moe, "_batched_linear"), (torch.nn.functional, "linear")):
            monkeypatch.setattr(place, name, spy(getattr(place, name)))
        for name, module in model.named_modules():
            if name.endswith(".experts"):
                module.register_forward_pre_hook(lambda *_, name=name: layers.append(name))
        loss = train(model)
        return kept, loss

    return run


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_products_get_what_the_dump_holds(load, spied, tmp_path, family, implementation):
    loss = dump(load(family, implementation), tmp_path / "dump")
    expected, plain_loss = spied(load(family, implementation))
    assert torch.equal(loss, plain_loss)
    with DumpReader(tmp_path / "dump") as reader:
        found = by_call(reader)
        assert {record.source.layer_type for record in reader.records} == {"experts"}
    assert sum(map(len, expected.values())) == len(found) >= 4
    for name, products in expected.items():
        for call, (rows, weight, output) in enumerate(products):
            tensors = found[name, call]
            assert torch.equal(tensors["input"], rows)
            assert torch.equal(tensors["grad_output"], output.grad)
            whole = tensors["weight"]
            assert torch.equal(whole[tensors["expert"]] if implementation == "batched_mm" else whole, weight)


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "tiny_onn"])
def test_weight_gradients_follow_row_by_row(load, tmp_path, family, implementation, recomputed):
    model = load(family, implementation)
    if recomputed:
        enable_gradient_checkpointing(model, reentrant=False)
    dump(model, tmp_path / "dump", tensors=["input", "grad_output", "expert"])
    assert _get_current_function_mode_stack() == []
    plain = load(family, implementation)
    train(plain)
    with DumpReader(tmp_path / "dump") as reader:
        rebuilt = {name: torch.zeros_like(weight) for name, weight in model.named_parameters() if weight.ndim == 3}
        for (name, _), tensors in by_call(reader).items():
            for expert in tensors["expert"].unique():
                mine = tensors["expert"] == expert
                rebuilt[name][expert] += tensors["grad_output"][mine].T @ tensors["input"][mine]
    for name, gradient in rebuilt.items():
        assert gradient.any()
        assert torch.equal(model.get_parameter(name).grad, plain.get_parameter(name).grad)
        if implementation == "batched_mm":  # sums one product per row
            torch.testing.assert_close(gradient, plain.get_parameter(name).grad, rtol=1e-5, atol=1e-8)
        else:
            assert torch.equal(gradient, plain.get_parameter(name).grad)


def test_an_error_among_the_experts_leaves_nothing_behind(load, tmp_path):
    model = load("qwen3_moe", "grouped_mm")
    model.model.layers[0].mlp.experts.act_fn = torch.nn.Linear(N + 1, N)
    with pytest.raises(RuntimeError, match="cannot be multiplied"), TensorDump(model, tmp_path / "dump"):
        train(model)
    assert _get_current_function_mode_stack() == []
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
