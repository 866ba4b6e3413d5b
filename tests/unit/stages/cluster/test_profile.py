import torch

from stages.cluster.views import profile_features

G, F = 3, 7


def draw():
    return torch.rand(G, F, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.1


def test_rows_have_neuron_length():
    features_FG = profile_features(draw())
    assert features_FG.shape == (F, G)
    assert features_FG.dtype == torch.float32
    torch.testing.assert_close(features_FG.norm(dim=1), torch.ones(F))


def test_neither_a_loud_domain_nor_a_loud_neuron_counts_more():
    taylor_GF = draw()
    loud_GF = taylor_GF * torch.tensor([1e-9, 1.0, 1e6])[:, None]
    torch.testing.assert_close(profile_features(loud_GF), profile_features(taylor_GF))
    even_GF = torch.ones(G, F) * torch.arange(1.0, F + 1)
    torch.testing.assert_close(profile_features(even_GF), torch.full((F, G), G**-0.5))


def test_neurons_of_different_domains_have_nothing_in_common():
    features_FG = profile_features(torch.eye(G).repeat(1, 2).double())
    torch.testing.assert_close(features_FG @ features_FG.T, torch.eye(G).repeat(2, 2))


def test_a_neuron_of_no_importance_has_no_direction():
    taylor_GF = draw()
    taylor_GF[:, 4] = 0
    features_FG = profile_features(taylor_GF)
    assert not features_FG[4].any()
    assert features_FG.isfinite().all()
