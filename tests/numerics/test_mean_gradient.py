"""Mean FFN gradients without weight gradients, against autograd's."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from models.pico import write_pico
from stages.data.batches import batch_sequences
from stages.data.sequences import TokenSequence
from stages.project.mean_gradient import layers_per_pass, mean_gradients

LENGTHS = (9, 5, 7)


@pytest.mark.parametrize("memory", [1.0, 1e-9])  # all layers in one pass; one layer a pass
def test_mean_gradients_equal_autograd(tmp_path, memory):
    folder = write_pico(tmp_path, "qwen3", layers=3, hidden=24, intermediate=40)
    generator = torch.Generator().manual_seed(3)
    sequences = []
    for index, length in enumerate(LENGTHS):
        ids = torch.randint(1, 61, (length,), generator=generator).tolist()
        sequences.append(TokenSequence(f"sample {index}", ids, ids))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
    mlps = [layer.mlp for layer in model.model.layers]
    batches = batch_sequences(sequences, 18, 0)
    found = list(mean_gradients(model, mlps, batches, ["gate", "up", "down"], memory=memory))
    assert all(parameter.grad is None for parameter in model.parameters())

    model.requires_grad_(True)
    for sequence in sequences:
        ids = torch.tensor([sequence.ids])
        logits = model(input_ids=ids).logits
        (torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]) / len(sequences)).backward()
    assert len(found) == 3
    for gradients, mlp in zip(found, mlps, strict=True):
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, getattr(mlp, f"{name}_proj").weight.grad, rtol=1e-4, atol=1e-7)


def test_layers_per_pass_fills_the_memory():
    mlp = torch.nn.Module()
    mlp.down_proj = torch.nn.Linear(1024, 256)
    assert layers_per_pass(mlp, ["gate", "down"], memory=4 * 2 * 1024 * 256 * 5 / 2**30) == 5
    assert layers_per_pass(mlp, ["gate", "down"], memory=1e-9) == 1
