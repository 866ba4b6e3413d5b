"""The parameter-level scanner on bitsandbytes weights, which have no gradient."""

import pytest
import torch
from pico import write_pico
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from unit.instruments.parameter_scan.recordings import ARRAYS

from instruments.parameter_scan.passes import Passes
from instruments.parameter_scan.scanner import ParameterTensorScanner

bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    # 4-bit blocks have 64 elements.
    return write_pico(tmp_path_factory.mktemp("dense"), "qwen3", hidden=64, intermediate=128, tie=True)


def load(folder, **settings):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **settings).eval().requires_grad_(False)


def draw():
    ids = torch.randint(1, 61, (3, 9), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "labels": ids.clone()}


def scan(model, **settings):
    with ParameterTensorScanner(model, **settings) as scanner:
        model(**draw()).loss.backward()
        (record,) = scanner.collect()
    return scanner.parameters, record


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("product", ["gram", "direct"])
def test_four_bits_equal_an_fp32_twin_with_dequantised_weights(folder, kind, product, monkeypatch):
    monkeypatch.setattr(Passes, "product", product)
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_compute_dtype=torch.float32)
    quantised = load(folder, quantization_config=settings)
    twin = load(folder)
    linears = {name: module for name, module in quantised.named_modules() if isinstance(module, bnb.nn.Linear4bit)}
    for name, module in linears.items():
        weight = bnb.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
        twin.get_submodule(name).weight.copy_(weight)
    parameters, found = scan(quantised)
    _, expected = scan(twin)
    assert len(linears) == len(parameters) - 1 == 14
    assert [(p.in_features, p.out_features) for p in parameters if "up_proj" in p.name] == [(64, 128)] * 2
    for name in ARRAYS.values():
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-5, atol=0, msg=name)


def test_eight_bits_equal_the_product_of_what_the_layers_saw(folder):
    """The forward pass quantises activations, so the reference is GᵀX of the model itself, not of a plain twin."""
    model = load(folder, quantization_config=BitsAndBytesConfig(load_in_8bit=True))
    linears = {name: module for name, module in model.named_modules() if isinstance(module, bnb.nn.Linear8bitLt)}
    parameters, record = scan(model)
    seen = {}

    def keep(name):
        def hook(_module, args, out):
            out.retain_grad()
            seen[name] = (args[0].detach().double(), out)

        linears[name].register_forward_hook(hook)

    for name in linears:
        keep(name)
    model.get_input_embeddings().register_forward_hook(lambda _m, _args, out: out.requires_grad_())
    logits = model(input_ids=draw()["input_ids"]).logits
    cross_entropy(logits[:, :-1].flatten(0, 1), draw()["labels"][:, 1:].flatten()).backward()
    assert len(linears) == 14
    for column, parameter in enumerate(parameters):
        if parameter.kind == "embedding":
            continue
        x_BTI, out = seen[parameter.name.removesuffix(".weight")]
        truth = torch.einsum("bto,bti->boi", out.grad.double(), x_BTI).flatten(1).norm(dim=1)
        torch.testing.assert_close(record.gradient_BP[:, column].double(), truth, rtol=1e-5, atol=0)
