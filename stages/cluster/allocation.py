"""How many experts each layer gives to a pool that all layers share."""

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from models.config import MoEShape
from stages.artifacts.statistics import NeuronStatistics, Scores


def layer_shapes(shape: MoEShape, allocation: str, scores: Scores, statistics: NeuronStatistics) -> list[MoEShape]:
    """The shape by which each layer's own neurons are grouped, for `cluster.allocation`.

    A layer of e experts is grouped as if a token chose among these alone: K of them, at most half, since where all are
    chosen no grouping is better than another. An expert holds no neuron twice, and copies of a neuron are made only
    where the pool has more places than the model has neurons.
    """
    layers, width = scores.chosen.shape
    most = max((width - shape.always_on) // shape.n, -(-shape.experts // layers))
    given_L = share_experts(
        weigh_layers(allocation, scores, statistics, shape.experts * shape.n),
        shape.experts,
        least=min(1, shape.experts // layers),
        most=most,
    )
    counts = map(int, given_L.tolist())
    return [replace(shape, experts=given, top_k=max(1, min(shape.top_k, given // 2))) for given in counts]


def weigh_layers(allocation: str, scores: Scores, statistics: NeuronStatistics, slots: int) -> Float[Tensor, "L"]:
    """What the layers' shares of the pool are in proportion to, fp64."""
    if allocation == "contribution":
        return statistics.contribution.double().sum(1)
    best_L = count_best(scores.chosen, slots).double()
    if allocation == "score":
        return best_L
    # Next to equal, so that only ties are decided by it.
    return 1 + 1e-6 * best_L.argsort(stable=True).argsort()


def count_best(scores_LF: Float[Tensor, "L F"], slots: int) -> Int[Tensor, "L"]:
    """How many neurons of each layer are among the `slots` that stand highest above their own layer's mean.

    Scores are comparable within a layer only. Ranks would give every layer the same; standard deviations tell a layer
    with few outstanding neurons from one with many.
    """
    spread_L1 = scores_LF.std(1, keepdim=True).clamp_min(torch.finfo(scores_LF.dtype).tiny)
    above_LF = (scores_LF - scores_LF.mean(1, keepdim=True)) / spread_L1
    best = above_LF.flatten().argsort(descending=True, stable=True)[:slots]
    counts_L: Tensor = (best // scores_LF.shape[1]).bincount(minlength=len(scores_LF))
    return counts_L


def share_experts(weights_L: Float[Tensor, "L"], experts: int, *, least: int, most: int) -> Int[Tensor, "L"]:
    """Deal experts out in proportion to weights.

    Args:
        weights_L: ``(L,)`` not negative.
        experts: E, between L·least and L·most.
        least: that every layer gets.
        most: that a layer can have.
    Returns:
        ``(L,)`` int64, sums to E; ties go to the lower layer.
    Source: Sainte-Laguë's highest quotients.
    """
    given_L = torch.full((len(weights_L),), least)
    for _ in range(experts - int(given_L.sum())):
        quotient_L = torch.where(given_L < most, weights_L / (2 * given_L + 1), -1.0)
        given_L[quotient_L.argmax()] += 1
    return given_L
