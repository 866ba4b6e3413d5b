"""Figures that tell whether a partition groups what fires together."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from models.routing import membership
from stages.cluster.features import CHUNK, unpack_bits


class Coactivation(NamedTuple):
    """Chance that two units both fire on a token; None where there is no such pair."""

    within: float | None
    between: float | None

    @property
    def ratio(self) -> float | None:
        """How many times likelier it is within an expert; 1 for a blind partition."""
        return self.within / self.between if self.within is not None and self.between else None


def measure_coactivation(
    active_bits_Fr: UInt8[Tensor, "F r"], tokens: int, units_EN: Int[Tensor, "E N"]
) -> Coactivation:
    """Mean co-activation of two units of one expert, and of two units of different experts.

    Counted per token from how many units of each expert fire, never pair by pair. Copies of a unit in two experts are
    no pair.

    Args:
        active_bits_Fr: ``(F, ceil(R/8))`` packed bits.
        tokens: R, at least 1.
        units_EN: ``(E, N)`` units of every expert.
    Returns:
        Both chances, over reservoir tokens and pairs.
    """
    experts, size = units_EN.shape
    member_EF = membership(units_EN, len(active_bits_Fr))
    copies_F = member_EF.sum(0).long()
    firing_RE = torch.zeros(tokens, experts)
    same_unit = 0
    for start in range(0, len(active_bits_Fr), CHUNK):
        bits_UR = unpack_bits(active_bits_Fr[start : start + CHUNK], tokens)
        copies_U = copies_F[start : start + CHUNK]
        firing_RE += bits_UR.T @ member_EF[:, start : start + CHUNK].T
        same_unit += int((bits_UR.sum(1).long() * copies_U * (copies_U - 1)).sum())
    firing_RE = firing_RE.long()
    squares = int(firing_RE.square().sum())
    within = squares - int(firing_RE.sum())
    between = int(firing_RE.sum(1).square().sum()) - squares - same_unit
    pairs_within = experts * size * (size - 1)
    pairs_between = (experts * size) ** 2 - experts * size**2 - int((copies_F * (copies_F - 1)).sum())
    return Coactivation(_mean(within, pairs_within * tokens), _mean(between, pairs_between * tokens))


def share_of(contribution_F: Float[Tensor, "F"], units: Int[Tensor, "U"]) -> float:
    """Share of the layer's contribution that these units carry; 0 in a layer that contributes nothing."""
    total = float(contribution_F.sum())
    return float(contribution_F[units].sum()) / total if total else 0.0


def _mean(total: int, count: int) -> float | None:
    return total / count if count else None
