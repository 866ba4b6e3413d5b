import subprocess
import sys

import pytest
import torch
from numerics.quantised_models import STORED, decoded_weights, store_quantised, write_plain
from torch import nn

from instruments.errors import ConfigError
from models import quantization
from models.config import ModelConfig
from models.ffn import dense_weight
from models.loading import load_dense, require_bitsandbytes
from models.quantization import import_bitsandbytes

QUANTISED = ["nf4", "fp4", "int8"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return write_plain(tmp_path_factory.mktemp("plain"), "llama")


def quantised_layers(model):
    kinds = (import_bitsandbytes().nn.Linear4bit, import_bitsandbytes().nn.Linear8bitLt)
    return {name for name, module in model.named_modules() if isinstance(module, kinds)}


@pytest.mark.parametrize("kind", QUANTISED)
def test_every_linear_layer_but_the_head_is_quantised(plain, kind):
    model = load_dense(ModelConfig(device="cpu", quantization=kind), plain)
    layers = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert quantised_layers(model) == layers - {"lm_head"}
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.dtype == model.get_input_embeddings().weight.dtype == torch.float32


@pytest.mark.parametrize("kind", STORED)
def test_a_stored_checkpoint_is_loaded_as_it_is(plain, tmp_path, kind):
    folder = store_quantised(plain, tmp_path, kind)
    for asked in ("none", kind.removesuffix("-nested")):
        assert len(quantised_layers(load_dense(ModelConfig(device="cpu", quantization=asked), folder))) == 14


@pytest.mark.parametrize("kind", ["none", *QUANTISED])
def test_dense_weights_are_those_that_transformers_decodes(plain, kind, caplog):
    model = load_dense(ModelConfig(device="cpu", quantization=kind), plain)
    for _ in range(2):
        for name, expected in decoded_weights(model):
            weight = dense_weight(model.get_submodule(name))
            assert torch.equal(weight, expected), name
            assert weight.dtype == torch.float32
            assert not weight.requires_grad
        model(torch.arange(5)[None])  # an int8 layer moves the scales out of its weight in its first pass
    assert caplog.text == ""


def test_no_bitsandbytes_or_one_without_code_for_any_device(monkeypatch):
    monkeypatch.setattr(import_bitsandbytes(), "supported_torch_devices", {"elsewhere"})
    with pytest.raises(ConfigError) as caught:
        require_bitsandbytes("nf4")
    assert caught.value.what.startswith("bitsandbytes cannot be used here: None of the available devices")
    assert caught.value.where == "weights in nf4"
    assert "model.quantization=none" in caught.value.do
    monkeypatch.setattr(quantization, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match="quantisation needs the package bitsandbytes"):
        import_bitsandbytes()


def test_its_import_asks_the_hub_for_no_kernel():
    """Runs in a fresh process; a stand-in for `kernels` prints requests. Only CPUs with AVX512-BF16 would send one."""
    program = (
        "import sys, types\n"
        "import torch\n"
        "from models.quantization import import_bitsandbytes\n"
        "kernels = types.ModuleType('kernels')\n"
        "kernels.get_kernel = lambda *_a, **_k: print('asked')\n"
        "sys.modules['kernels'] = kernels\n"
        "import_bitsandbytes()\n"
        "assert sys.modules['kernels'] is kernels\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "asked" not in done.stdout
