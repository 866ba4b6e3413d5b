"""Fused projections, in checkpoints and in modules."""

import pytest
import torch
from pico import load_frozen, write_pico

from instruments.errors import CheckpointError, ConfigError
from instruments.ffn_probe import probe_gradients
from models.checkpoint.shards import DenseReader
from models.ffn import DenseFFN, ffn_modules, ffn_weight_names, separate_ffns
from models.targets.base import copied

D, F, HEADS, KEY_HEADS = 24, 40, 4, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_pico(tmp_path_factory.mktemp("phi3"), "phi3", hidden=D, intermediate=F)


def test_parts_are_the_rows_that_the_model_takes_them_to_be(folder):
    layer = load_frozen(folder).model.layers[1]
    width = D // HEADS
    q, k, v = layer.self_attn.qkv_proj.weight.split([HEADS * width, KEY_HEADS * width, KEY_HEADS * width])
    gate, up = layer.mlp.gate_up_proj.weight.chunk(2)
    with DenseReader(folder) as reader:
        for part, weight in {"gate": gate, "up": up, "down": layer.mlp.down_proj.weight}.items():
            assert torch.equal(reader.projection(1, part), weight), part
        name = "model.layers.1.self_attn.qkv_proj.weight"
        parts = copied(reader.decoder, name, reader.tensor(name))
        with pytest.raises(CheckpointError, match=r"no tensor model\.layers\.7\.mlp\.gate_"):
            reader.tensor("model.layers.7.mlp.gate_proj.weight")
    for letter, weight in {"q": q, "k": k, "v": v}.items():
        assert torch.equal(parts[name.replace("qkv", letter)], weight), letter


def test_separate_ffns_are_views_that_compute_the_same(folder):
    model = load_frozen(folder)
    ids = torch.arange(14).view(2, 7)
    before = model(ids).logits
    fused = [layer.mlp.gate_up_proj.weight for layer in model.model.layers]
    separate_ffns(model)
    torch.testing.assert_close(model(ids).logits, before)
    for mlp, weight in zip(ffn_modules(model), fused, strict=True):
        assert mlp.gate_proj.weight.data_ptr() == weight.data_ptr()
        assert torch.equal(torch.cat([DenseFFN.of(mlp).gate_FD, DenseFFN.of(mlp).up_FD]), weight)
    assert ffn_weight_names(model)[1]["up"] == "model.layers.1.mlp.up_proj.weight"
    separate_ffns(model)
    torch.testing.assert_close(model(ids).logits, before)


def test_probes_see_separate_ffns(folder):
    """Gradients of gate and up against autograd's gradient of the fused weight."""
    ids = torch.arange(7)[None]
    whole = load_frozen(folder).requires_grad_(True)
    whole(ids, labels=ids).loss.backward()
    model, found = load_frozen(folder), {}
    separate_ffns(model)
    model.get_input_embeddings().weight.requires_grad_(True)

    def keep(layer, record):
        gradients = torch.cat([record.gate_grad_BTF, record.up_grad_BTF], dim=2)[0]
        found[layer] = gradients.T @ record.x_BTD[0]

    with probe_gradients(ffn_modules(model), keep):
        model(ids, labels=ids).loss.backward()
    for layer, gradient in found.items():
        expected = whole.model.layers[layer].mlp.gate_up_proj.weight.grad
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)
    assert len(found) == 2


def test_offloaded_weights_have_no_views(folder):
    model = load_frozen(folder).to("meta")
    with pytest.raises(ConfigError, match="gate and up are one weight") as caught:
        separate_ffns(model)
    assert caught.value.where == "layer 0, gate_up_proj"
