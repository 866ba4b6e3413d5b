"""Gradient norms of 4- and 8-bit models, and of half-precision ones, against autograd on an fp32 twin."""

import pytest
import torch
from numerics.quantised_models import plain_twin, store_quantised, write_plain
from torch.nn.functional import cross_entropy

from instruments.ffn_probe import neuron_norms, probe_gradients
from models.config import ModelConfig
from models.ffn import ffn_modules
from models.loading import load_dense
from stages.losses import enable_gradient_checkpointing

IDS = torch.randint(1, 61, (3, 9), generator=torch.Generator().manual_seed(5))
# Bound of the relative error of a layer's norms.
BOUNDS = {
    ("none", "float32"): 1e-5,
    ("nf4", "float32"): 1e-5,
    ("fp4", "float32"): 1e-5,
    ("none", "bfloat16"): 5e-2,
    ("nf4", "bfloat16"): 5e-2,
    ("none", "float16"): 1e-2,
    ("nf4", "float16"): 1e-2,
    # The forward pass also rounds activations to 8 bits.
    ("int8", "float32"): 1e-1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_plain(tmp_path_factory.mktemp("plain"), "qwen3", dtype=torch.float32, tie=True)


def load(folder, quantization="none", dtype="float32"):
    return load_dense(ModelConfig(device="cpu", quantization=quantization, dtype=dtype), folder)


def backward(model, on_layer):
    inputs_BTD = model.get_input_embeddings()(IDS).detach().requires_grad_(True)
    with probe_gradients(ffn_modules(model), on_layer):
        logits_BTV = model(inputs_embeds=inputs_BTD, use_cache=False).logits
        cross_entropy(logits_BTV[:, :-1].float().flatten(0, 1), IDS[:, 1:].flatten(), reduction="sum").backward()


def scanned_norms(model):
    """(L, 3, B, F) norms of the scan."""
    norms = {}
    backward(model, lambda layer, record: norms.update({layer: torch.stack([*neuron_norms(record, "auto").values()])}))
    return torch.stack([norms[layer] for layer in sorted(norms)])


def weight_norms(mlp):
    gate, up, down = mlp.gate_proj.weight.grad, mlp.up_proj.weight.grad, mlp.down_proj.weight.grad
    return torch.stack([gate.norm(dim=1), up.norm(dim=1), down.norm(dim=0)])


def true_norms(twin):
    """(L, 3, B, F) norms of plain per-sample weight gradients."""
    twin.requires_grad_(True)
    samples = []
    for ids_T in IDS:
        twin.zero_grad()
        cross_entropy(twin(ids_T[None]).logits[0, :-1], ids_T[1:], reduction="sum").backward()
        samples.append(torch.stack([weight_norms(mlp) for mlp in ffn_modules(twin)]))
    return torch.stack(samples, dim=2)


@pytest.mark.parametrize(("quantization", "dtype"), BOUNDS)
def test_norms_equal_those_of_a_plain_twin(folder, quantization, dtype):
    model = load(folder, quantization, dtype)
    expected = true_norms(plain_twin(model, folder))
    found = scanned_norms(model)
    errors_L3 = (found - expected).flatten(2).norm(dim=2) / expected.flatten(2).norm(dim=2)
    assert errors_L3.max() <= BOUNDS[quantization, dtype]
    if BOUNDS[quantization, dtype] == 1e-5:
        assert ((found - expected).abs() / expected).max() <= 1e-5


def test_int8_norms_are_those_of_the_gradients_that_flow(folder):
    """The reference is GᵀX from tensors that plain hooks see, which includes the rounding of activations."""
    model = load(folder, "int8")
    seen = {}

    def watch(name):
        def hook(_module, args, output):
            seen[name] = args[0].detach()
            output.register_hook(lambda grad: seen.update({name + ".grad": grad}))

        return hook

    mlps = ffn_modules(model)
    for layer, mlp in enumerate(mlps):
        for part in ("gate", "up", "down"):
            getattr(mlp, f"{part}_proj").register_forward_hook(watch(f"{layer}.{part}"))
    found = scanned_norms(model)
    for layer in range(len(mlps)):
        for part, name in enumerate(("gate", "up", "down")):
            product_BFD = seen[f"{layer}.{name}.grad"].mT @ seen[f"{layer}.{name}"]
            expected_BF = product_BFD.norm(dim=1 if name == "down" else 2)
            torch.testing.assert_close(found[layer, part], expected_BF, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_recomputed_activations_change_nothing(folder, quantization, reentrant):
    plain, recomputing = load(folder, quantization), load(folder, quantization)
    enable_gradient_checkpointing(recomputing, reentrant=reentrant)
    torch.testing.assert_close(scanned_norms(recomputing), scanned_norms(plain), rtol=1e-6, atol=0)


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_gradients_flow_after_passes_without_any(folder, quantization):
    model = load(folder, quantization)
    before = scanned_norms(model)
    with torch.no_grad():
        model(IDS)
    assert torch.equal(scanned_norms(model), before)
    # On a CPU with AVX512-BF16 this pass would have packed 4-bit weights into a form that has no gradient.
    assert not any(getattr(module, "support_avx512bf16_for_cpu", False) for module in model.modules())


@pytest.mark.parametrize("stored", ["nf4", "nf4-nested", "fp4", "int8"])
def test_a_stored_checkpoint_computes_in_the_format_asked_for(folder, tmp_path, stored):
    """transformers alone keeps plain weights and the products of 4-bit layers in the stored number format."""
    source = store_quantised(folder, tmp_path / "stored", stored)
    model = load(source)
    plain = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    assert {parameter.dtype for parameter in plain} == {torch.float32}
    twin = plain_twin(model, folder)
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            twin.get_parameter(name).data = parameter.data.clone()
    errors = (scanned_norms(model) - true_norms(twin)).norm() / true_norms(twin).norm()
    assert errors <= (1e-1 if stored == "int8" else 1e-6)
