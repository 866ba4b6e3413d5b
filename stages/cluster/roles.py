"""What becomes of each unit of a layer: always on, routed to experts, or dropped."""

from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor


class Roles(NamedTuple):
    """Every unit of a layer in one of three roles; indices ascend."""

    always_on_S: Int[Tensor, "S"]
    routed_U: Int[Tensor, "U"]
    dropped_X: Int[Tensor, "X"]


def split_units(measure_F: Float[Tensor, "F"], scores_F: Float[Tensor, "F"], *, always_on: int, slots: int) -> Roles:
    """Keep the S units of highest measure on for every token, and drop what finds no slot in an expert.

    Args:
        measure_F: ``(F,)`` what always-on units are chosen by.
        scores_F: ``(F,)`` of the other units, those with the lowest score are dropped.
        always_on: S, below F.
        slots: E·N places in experts.
    Returns:
        The roles; ties go to the lower index.
    """
    by_measure_F = measure_F.argsort(descending=True, stable=True)
    rest = by_measure_F[always_on:].sort().values
    by_score = rest[scores_F[rest].argsort(descending=True, stable=True)]
    return Roles(
        always_on_S=by_measure_F[:always_on].sort().values,
        routed_U=by_score[:slots].sort().values,
        dropped_X=by_score[slots:].sort().values,
    )
