"""Quantised models on a GPU against fp32 twins on the CPU; offloaded models against the whole model on the GPU."""

import pytest
import torch
from numerics.quantised_models import plain_twin, write_plain

from models.config import ModelConfig
from models.loading import input_device, is_offloaded, load_dense

# bitsandbytes says that a width of 40 gets its slower kernels.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:inner dimension")]
IDS = torch.randint(1, 61, (3, 9), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_plain(tmp_path_factory.mktemp("plain"), "qwen3", dtype=torch.float32, layers=4, tie=True)


def input_gradient(model):
    """Gradient at the embeddings, after the backward pass of every layer."""
    ids = IDS.to(input_device(model))
    inputs_BTD = model.get_input_embeddings()(ids).detach().requires_grad_(True)
    model(inputs_embeds=inputs_BTD, use_cache=False).logits.float().logsumexp(-1).sum().backward()
    return inputs_BTD.grad.cpu()


@pytest.mark.parametrize(("quantization", "bound"), [("none", 1e-4), ("nf4", 1e-4), ("fp4", 1e-4), ("int8", 1e-1)])
def test_gradients_equal_those_of_a_plain_twin_on_the_cpu(folder, quantization, bound):
    model = load_dense(ModelConfig(device="cuda", dtype="float32", quantization=quantization), folder)
    twin = plain_twin(model, folder).cpu().requires_grad_(False)
    found, expected = input_gradient(model), input_gradient(twin)
    assert (found - expected).norm() <= bound * expected.norm()


def test_layers_on_gpu_cpu_and_disk_compute_what_one_device_does(folder):
    settings = {"device": "cuda", "dtype": "float32"}
    whole = load_dense(ModelConfig(**settings), folder)
    logit_std = load_dense(ModelConfig(**settings, device_map="auto", gpu_memory="130KB", cpu_memory="130KB"), folder)
    assert is_offloaded(logit_std)
    assert {"cpu", "disk"} <= set(logit_std.hf_device_map.values())
    torch.testing.assert_close(input_gradient(logit_std), input_gradient(whole), rtol=1e-4, atol=1e-6)
