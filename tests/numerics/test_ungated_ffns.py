"""FFNs of two matrices: gate and up are one, and the activation is the quotient of the FFN's own by its argument."""

import pytest
import torch
from pico import write_pico
from torch.nn.functional import cross_entropy
from transformers.activations import ACT2FN

from instruments.ffn_probe import neuron_norms, probe_gradients
from models.config import ModelConfig
from models.ffn import DenseFFN, ffn_modules
from models.loading import load_dense
from models.tiny_onn.sparse_ffn import Quotient

IDS = torch.tensor([[3, 14, 15, 9, 26, 5, 35]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_pico(tmp_path_factory.mktemp("dense"), "nemotron")


def load(folder):
    return load_dense(ModelConfig(kind="local", path=str(folder), device="cpu"), folder)


@pytest.mark.parametrize("name", ["relu", "relu2", "gelu", "gelu_pytorch_tanh", "silu"])
def test_a_quotient_times_its_argument_is_the_activation(name):
    z = (torch.arange(-50, 51, dtype=torch.float64) / 10).requires_grad_()
    assert (z == 0).any()
    product = Quotient(ACT2FN[name])(z) * z
    torch.testing.assert_close(product, ACT2FN[name](z), rtol=1e-12, atol=1e-15)
    (gradient,) = torch.autograd.grad(product.sum(), z)
    (wanted,) = torch.autograd.grad(ACT2FN[name](z).sum(), z)
    other = z != 0
    torch.testing.assert_close(gradient[other], wanted[other], rtol=1e-9, atol=1e-12)
    assert gradient.isfinite().all()


def test_the_neurons_of_two_matrices_are_those_of_the_model(folder):
    model, separated = load(folder), []
    for ffn in ffn_modules(model):
        assert ffn.gate_proj.weight.data_ptr() == ffn.up_proj.weight.data_ptr()
        separated.append(DenseFFN.of(ffn))
    x_TD = torch.randn(9, 24)
    for ffn, neurons in zip(ffn_modules(model), separated, strict=True):
        z_TF = x_TD @ ffn.up_proj.weight.T
        torch.testing.assert_close(neurons.hidden(x_TD), z_TF.relu() ** 2)
        torch.testing.assert_close(ffn(x_TD), neurons(x_TD))


def test_the_gradients_of_gate_and_up_sum_to_that_of_their_matrix(folder):
    """With relu(z)**2 both are the same, so that their norms sum to its norm."""
    model, found = load(folder), {}

    def keep(layer, record):
        found[layer] = neuron_norms(record, "direct")

    with probe_gradients(ffn_modules(model), keep):
        embedded = model.get_input_embeddings()(IDS).requires_grad_()
        logits = model(inputs_embeds=embedded).logits
        cross_entropy(logits[0, :-1], IDS[0, 1:]).backward()
    weights = [ffn.up_proj.weight.requires_grad_() for ffn in ffn_modules(model)]
    for ffn, weight in zip(ffn_modules(model), weights, strict=True):
        ffn.gate_proj.weight = weight
    cross_entropy(model(input_ids=IDS).logits[0, :-1], IDS[0, 1:]).backward()
    for layer, weight in enumerate(weights):
        norms = found[layer]
        torch.testing.assert_close(norms["gate"], norms["up"])
        torch.testing.assert_close((norms["gate"] + norms["up"])[0], weight.grad.norm(dim=1))
