import pytest
import torch
from pico import write_pico

from models.config import ModelConfig
from models.ffn import DenseFFN, ffn_modules
from models.loading import load_dense

T, D, F = 7, 40, 72


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_pico(tmp_path_factory.mktemp("pico"), "qwen3", hidden=D, intermediate=F)


@pytest.fixture
def x_TD():
    return torch.randn(T, D, generator=torch.Generator().manual_seed(0))


def last_ffn(folder, **settings):
    return ffn_modules(load_dense(ModelConfig(device="cpu", **settings), folder))[-1]


def test_plain_weights_are_not_copied(folder, x_TD):
    mlp = last_ffn(folder)
    for ffn in (DenseFFN.of(mlp), DenseFFN.of(mlp, x_TD)):
        assert ffn.width == F
        assert ffn.gate_FD.data_ptr() == mlp.gate_proj.weight.data_ptr()
        torch.testing.assert_close(ffn(x_TD), mlp(x_TD))


def test_weights_on_disk_are_fetched(folder, x_TD):
    away, here = last_ffn(folder, device_map="auto", cpu_memory="1KB"), last_ffn(folder)
    assert away.down_proj.weight.device.type == "meta"
    assert torch.equal(DenseFFN.of(away)(x_TD), DenseFFN.of(here)(x_TD))
    assert away.down_proj.weight.device.type == "meta"


@pytest.mark.parametrize("quantization", ["none", "nf4", "int8"])
def test_weights_take_the_number_format_of_what_they_meet(folder, x_TD, quantization):
    ffn = DenseFFN.of(last_ffn(folder, quantization=quantization), x_TD.bfloat16())
    assert ffn(x_TD.bfloat16()).dtype == torch.bfloat16
