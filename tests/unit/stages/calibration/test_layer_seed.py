from itertools import product

from stages.calibration.batches import layer_seed


def test_runs_and_layers_never_share_a_seed():
    """The second range of indices is that of a stage that adds an offset."""
    indices = [*range(80), *range(5_000, 5_080)]
    seeds = [layer_seed(seed, index) for seed, index in product(range(50), indices)]
    assert len(set(seeds)) == len(seeds)


def test_seeds_stay_what_they_are():
    assert (layer_seed(0, 4), layer_seed(3, 5)) == (4, 30_026)
