import torch
from transformers.activations import ACT2FN

from models.experts import TinyONNExpert


def test_an_expert_is_the_gated_ffn_of_its_neurons():
    generator = torch.Generator().manual_seed(0)
    gate, up, down, x = (torch.randn(size, generator=generator) for size in ((5, 6), (5, 6), (6, 5), (7, 6)))
    expert = TinyONNExpert.from_tensors(gate, up, down, "gelu")
    assert expert.gate_proj.weight.data_ptr() == gate.data_ptr()
    by_hand = torch.stack([sum(ACT2FN["gelu"](gate[n] @ t) * (up[n] @ t) * down[:, n] for n in range(5)) for t in x])
    torch.testing.assert_close(expert(x.view(7, 1, 6))[:, 0], by_hand)
