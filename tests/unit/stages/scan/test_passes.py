import numpy as np
import pytest
import torch
from pico import write_pico

from instruments.errors import CheckpointError
from models.config import ModelConfig
from models.loading import load_dense
from stages.scan.passes import check_causal, check_mean_loss, draw_reservoir, slots_of_batch, token_to_neuron_major


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_a_model_that_sees_later_tokens(tmp_path, model_type, dtype):
    model = load_dense(ModelConfig(device="cpu", dtype=dtype), write_pico(tmp_path, model_type, layers=1))
    check_causal(model)
    model.model.layers[0].register_forward_hook(lambda _module, _args, out: out + 0.2 * out.mean(1, keepdim=True))
    with pytest.raises(CheckpointError, match="earlier tokens see later ones") as refused:
        check_causal(model)
    assert refused.value.do == "choose a causal language model"


def test_a_model_that_predicts_the_text_worse_than_chance(tmp_path):
    model = load_dense(ModelConfig(device="cpu"), write_pico(tmp_path, "llama", layers=1))
    chance = float(np.log(model.config.vocab_size))
    check_mean_loss(chance + 1, model)
    with pytest.raises(CheckpointError, match="that of chance"):
        check_mean_loss(chance + 3, model)


def test_the_draw_is_uniform_size_and_seeded():
    slots_T = draw_reservoir(50, 11, seed=1)
    assert sorted(slots_T[slots_T >= 0].tolist()) == list(range(11))
    assert torch.equal(slots_T, draw_reservoir(50, 11, seed=1))
    assert not torch.equal(slots_T, draw_reservoir(50, 11, seed=2))
    assert (draw_reservoir(7, 11, seed=1) >= 0).all()


def test_slots_follow_real_tokens_past_padding():
    slots_T = torch.arange(10, 20)
    mask_BT = torch.tensor([[1, 1, 1], [1, 0, 0]]).bool()
    assert slots_of_batch(slots_T, 2, mask_BT).tolist() == [[12, 13, 14], [15, -1, -1]]


def test_bits_turn_from_tokens_to_neurons():
    active_LRF = np.random.default_rng(0).random((2, 5, 12)) < 0.4
    packed = torch.from_numpy(np.packbits(active_LRF, axis=2))
    turned = token_to_neuron_major(packed, width=12)
    assert np.array_equal(np.unpackbits(turned.numpy(), axis=2, count=5), active_LRF.transpose(0, 2, 1))
