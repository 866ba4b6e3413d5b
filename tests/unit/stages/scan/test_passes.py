import numpy as np
import torch

from stages.scan.passes import draw_reservoir, slots_of_batch, token_to_neuron_major


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
