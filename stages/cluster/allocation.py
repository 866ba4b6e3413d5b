"""How many experts each layer gives to a pool that all layers share."""

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from models.shape import MoEShape


def layer_shapes(shape: MoEShape, scores_LF: Float[Tensor, "L F"]) -> list[MoEShape]:
    """The shape by which each layer's own neurons are grouped into its share of the pool's experts.

    The shares are in proportion to the layers' neurons among the E·N that stand highest by score. A layer of e experts
    is grouped as if a token chose among these alone: K of them, at most half, since where all are chosen no grouping is
    better than another. An expert holds no neuron twice, and neurons are copied only where the pool has more places
    than the model has neurons.
    """
    layers, width = scores_LF.shape
    most = max((width - shape.always_on) // shape.n, -(-shape.experts // layers))
    given_L = share_experts(
        count_best(scores_LF, shape.experts * shape.n).double(),
        shape.experts,
        least=min(1, shape.experts // layers),
        most=most,
    )
    counts = map(int, given_L.tolist())
    return [replace(shape, experts=given, top_k=max(1, min(shape.top_k, given // 2))) for given in counts]


def count_best(scores_LF: Float[Tensor, "L F"], slots: int) -> Int[Tensor, "L"]:
    """How many neurons of each layer are among the `slots` that stand highest above their own layer's mean.

    Scores are comparable within a layer only. Ranks would give every layer the same; standard deviations tell a layer
    with few outstanding neurons from one with many.
    """
    deviation_L1 = scores_LF.std(1, keepdim=True).clamp_min(torch.finfo(scores_LF.dtype).tiny)
    above_LF = (scores_LF - scores_LF.mean(1, keepdim=True)) / deviation_L1
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
