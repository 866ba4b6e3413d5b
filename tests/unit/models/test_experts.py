import pytest
import torch
from pico import write_pico
from transformers.activations import ACT2FN

from models.checkpoint.shards import ShardReader
from models.dense import DENSE_FAMILIES
from models.experts import TinyONNExpert, slice_experts


def test_an_expert_is_the_gated_ffn_of_its_neurons():
    generator = torch.Generator().manual_seed(0)
    gate, up, down, x = (torch.randn(size, generator=generator) for size in ((5, 6), (5, 6), (6, 5), (7, 6)))
    expert = TinyONNExpert.from_tensors(gate, up, down, "gelu")
    assert expert.gate_proj.weight.data_ptr() == gate.data_ptr()
    by_hand = torch.stack([sum(ACT2FN["gelu"](gate[n] @ t) * (up[n] @ t) * down[:, n] for n in range(5)) for t in x])
    torch.testing.assert_close(expert(x.view(7, 1, 6))[:, 0], by_hand)


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    dense = write_pico(tmp_path_factory.mktemp("dense"), "llama", intermediate=37, dtype=torch.bfloat16)
    with ShardReader(dense) as opened:
        yield opened


def test_slices_are_rows_of_gate_and_up_and_columns_of_down(reader):
    neurons_EN = torch.tensor([[3, 8, 20], [36, 0, 8]], dtype=torch.int32)
    always_on_S = torch.tensor([5, 6, 7, 11], dtype=torch.int32)
    sliced = slice_experts(reader, DENSE_FAMILIES["llama"], 1, neurons_EN, always_on_S)
    gate, up, down = (reader.tensor(f"model.layers.1.mlp.{part}_proj.weight") for part in ("gate", "up", "down"))
    for e, neurons in enumerate(neurons_EN.tolist()):
        for n, neuron in enumerate(neurons):
            assert torch.equal(sliced.gate_END[e, n], gate[neuron])
            assert torch.equal(sliced.up_END[e, n], up[neuron])
            assert torch.equal(sliced.down_EDN[e, :, n], down[:, neuron])
    for s, neuron in enumerate(always_on_S.tolist()):
        assert torch.equal(sliced.shared_gate_SD[s], gate[neuron])
        assert torch.equal(sliced.shared_up_SD[s], up[neuron])
        assert torch.equal(sliced.shared_down_DS[:, s], down[:, neuron])
    assert sliced.gate_END.dtype == torch.bfloat16
    none = slice_experts(reader, DENSE_FAMILIES["llama"], 0, neurons_EN, always_on_S[:0])
    assert (none.shared_gate_SD.shape, none.shared_down_DS.shape) == ((0, 24), (24, 0))
