"""Seeds of the layers: equal random numbers in every layer would be correlated."""


def layer_seed(seed: int, index: int) -> int:
    """A layer's own seed; those of another run's `seed` lie apart.

    Args:
        seed: of the run.
        index: of the layer, below 10,007. Who must not repeat the draws of another stage adds an offset.
    """
    return seed * 10_007 + index
