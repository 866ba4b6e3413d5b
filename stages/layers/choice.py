"""Choose the layers that stay dense, within an average active width, from the cost of each layer alone."""

from collections.abc import Iterator, Sequence
from math import exp, log

from stages.layers.config import LEAST_GAIN, NARROWER


def choose_dense_layers(costs: Sequence[Sequence[float]], active: float, able: str) -> list[int]:
    """The layers that stay dense, so that the others' predicted costs have the lowest sum; ascending, possibly none.

    With n of L layers dense, the others keep a share (active·L − n) / (L − n) of their neurons, at least active / 2.
    Each dense layer must save `LEAST_GAIN` of the sum: around the minimum, differences are smaller than their error.

    Args:
        costs: two rows, each of a number >= 0 per layer: with the layer alone narrowed to a share `active` of its
            neurons, and to `NARROWER` times that. A cost's logarithm is taken to be linear in the share.
        active: average share of the neurons that serve a token, above 0.
        able: which layers the target can keep dense, see `MoETarget.dense_layers`.
    """
    wide, narrow = ([log(max(cost, 1e-12)) for cost in row] for row in costs)
    layers = len(wide)

    def predict(dense: list[int]) -> float:
        share = (active * layers - len(dense)) / (layers - len(dense))
        steps = (active - share) / (active - NARROWER * active)
        carved = {*range(layers)} - {*dense}
        costs = sum(exp(wide[layer] + steps * (narrow[layer] - wide[layer])) for layer in carved)
        return costs * (1 + LEAST_GAIN) ** len(dense)

    most = min(int(active * layers / (2 - active)), layers - 1)  # (active·L − n) / (L − n) >= active / 2
    ranked = sorted(range(layers), key=lambda layer: -narrow[layer])
    candidates: list[list[int]] = [dense for n in range(most + 1) for dense in _sets(n, layers, able, ranked)]
    best: list[int] = min(candidates, key=predict)
    return sorted(best)


def _sets(n: int, layers: int, able: str, ranked: Sequence[int]) -> Iterator[list[int]]:
    """The sets of n dense layers to compare."""
    if able == "any" or not n:
        yield [*ranked[:n]]
    elif able != "none":
        for last in range(n + 1 if able == "ends" else 1):
            yield [*range(n - last), *range(layers - last, layers)]
