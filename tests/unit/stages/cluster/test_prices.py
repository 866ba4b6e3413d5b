import torch

from stages.cluster.balance import fit_prices


def test_prices_spread_the_demand_of_a_favourite():
    generator = torch.Generator().manual_seed(0)
    affinity_UE = torch.rand(600, 5, generator=generator) + torch.tensor([0.8, 0.0, 0.0, 0.0, 0.4])
    sizes_E = torch.tensor([120, 120, 60, 180, 120])
    prices_E = fit_prices(affinity_UE, sizes_E)
    before_E = affinity_UE.argmax(1).bincount(minlength=5)
    after_E = (affinity_UE - prices_E).argmax(1).bincount(minlength=5)
    assert (before_E - sizes_E).abs().sum() > 500
    assert (after_E - sizes_E).abs().sum() < 60
    assert prices_E[0] > prices_E[4] > prices_E[1]


def test_no_preference_no_prices():
    assert fit_prices(torch.ones(7, 3), torch.tensor([3, 2, 2])).tolist() == [0.0, 0.0, 0.0]
    assert fit_prices(torch.ones(1, 1), torch.tensor([1])).tolist() == [0.0]
