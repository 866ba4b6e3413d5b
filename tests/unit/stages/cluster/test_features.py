import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from stages.cluster.methods import project_on_top_directions, unpack_bits

F, R, D = 37, 21, 9


@pytest.fixture
def bits_FR():
    bits_FR = np.random.default_rng(0).random((F, R)) < 0.3
    bits_FR[4] = False
    return bits_FR


def packed(bits_FR):
    return torch.from_numpy(np.packbits(bits_FR, axis=1))


def rng():
    return np.random.default_rng(1)


def cosines(rows):
    rows = normalize(rows, dim=1)
    return rows @ rows.T


def test_bits_come_back(bits_FR):
    assert torch.equal(unpack_bits(packed(bits_FR), R), torch.from_numpy(bits_FR).float())


def test_with_all_directions_the_cosine_is_the_share_of_tokens_where_both_fire(bits_FR):
    features_FC = project_on_top_directions(torch.from_numpy(bits_FR).float(), 64, rng())
    assert features_FC.shape == (F, R)
    bits = bits_FR.astype(float)
    fires = bits.sum(1)
    expected = bits @ bits.T / np.sqrt(np.outer(fires, fires).clip(1))
    torch.testing.assert_close(cosines(features_FC), torch.from_numpy(expected).float())


def test_a_neuron_that_never_fires_is_zero(bits_FR):
    features_FC = project_on_top_directions(torch.from_numpy(bits_FR).float(), 5, rng())
    assert features_FC.isfinite().all()
    assert not features_FC[4].any()


def test_few_directions_keep_what_the_best_ones_keep():
    gate_FD = torch.randn(F, 3, generator=torch.Generator().manual_seed(0)) @ torch.randn(
        3, D, generator=torch.Generator().manual_seed(1)
    )
    noisy_FD = gate_FD + 0.01 * torch.randn(F, D, generator=torch.Generator().manual_seed(2))
    features_FC = project_on_top_directions(noisy_FD, 3, rng())
    assert features_FC.shape == (F, 3)
    assert features_FC.dtype == torch.float32
    torch.testing.assert_close(cosines(features_FC), cosines(gate_FD), atol=0.05, rtol=0)
