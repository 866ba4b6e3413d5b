import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from stages.cluster.views import contribution_features, reduce_columns

T, F, D = 90, 23, 11


def cosines(rows_FC):
    directions_FC = normalize(rows_FC.double(), dim=1)
    return directions_FC @ directions_FC.T


def rng():
    return np.random.default_rng(0)


def low_rank(rank, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(T, rank, generator=generator) @ torch.rand(rank, F, generator=generator)


@pytest.mark.parametrize(("rank", "dims"), [(5, 5), (5, 9), (3, 64)])
def test_nothing_is_lost_where_the_directions_suffice(rank, dims):
    hidden_TF = low_rank(rank)
    found_FC = reduce_columns(lambda: hidden_TF.split(17), F, dims, rng())
    assert found_FC.shape == (F, min(dims, F))
    torch.testing.assert_close(found_FC @ found_FC.T, hidden_TF.T @ hidden_TF, rtol=1e-4, atol=1e-3)


def test_the_leading_directions_are_kept():
    """Against a full decomposition: no more is lost than the best choice loses, to within a hundredth."""
    generator = torch.Generator().manual_seed(1)
    hidden_TF = low_rank(4) + 0.05 * torch.rand(T, F, generator=generator)
    found_FC = reduce_columns(lambda: [hidden_TF], F, 6, rng())
    best = torch.linalg.svdvals(hidden_TF)[:6].square().sum()
    assert float(found_FC.square().sum() / best) == pytest.approx(1, abs=0.01)


def test_neurons_are_compared_by_what_they_add_to_each_token():
    """Signs do not matter, columns of down weigh, and a token a thousand times as loud counts like any other."""
    hidden_TF = low_rank(6) * torch.where(torch.arange(F) % 2 == 0, 1, -1)
    loud_TF = hidden_TF * torch.logspace(0, 3, T)[:, None]
    down_DF = torch.randn(D, F, generator=torch.Generator().manual_seed(2))
    exact_TF = normalize(hidden_TF.abs() * down_DF.norm(dim=0), dim=1)
    plain, loud = (
        contribution_features(lambda h_TF=h_TF: h_TF.split(31), down_DF, dims=64, rng=rng())
        for h_TF in (hidden_TF, loud_TF)
    )
    torch.testing.assert_close(cosines(plain), cosines(exact_TF.T), rtol=0, atol=1e-4)
    torch.testing.assert_close(cosines(loud), cosines(plain), rtol=0, atol=1e-4)


def test_a_silent_neuron_has_no_direction():
    hidden_TF = low_rank(4)
    hidden_TF[:, 3] = 0
    features_FC = contribution_features(lambda: [hidden_TF], torch.ones(D, F), dims=8, rng=rng())
    assert features_FC.isfinite().all()
    assert [row for row in range(F) if features_FC[row].norm() < 1e-5] == [3]


def test_all_silent():
    features_FC = contribution_features(lambda: [torch.zeros(T, F)], torch.ones(D, F), dims=8, rng=rng())
    assert not features_FC.any()
